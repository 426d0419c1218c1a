"""A collective under an if: the others go on.

rejected by: test_all_ranks_have_the_model_of_src
outcome: hang
phrase: rank 0
"""

import torch.distributed as dist
from torch import nn

from solutions.phase1_data_parallel.collectives import Group, broadcast


def broadcast_parameters(module: nn.Module, src: int = 0, group: Group = None) -> None:
    if dist.get_rank(group) == src:
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.detach().contiguous(), src, group)
