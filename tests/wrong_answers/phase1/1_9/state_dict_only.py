"""A state_dict has no buffer that is not persistent, and tied weights twice.

rejected by: test_all_ranks_have_the_model_of_src
phrase: hidden
"""

from torch import nn

from solutions.phase1_data_parallel.collectives import Group, broadcast


def broadcast_parameters(module: nn.Module, src: int = 0, group: Group = None) -> None:
    for tensor in module.state_dict().values():
        values = tensor.contiguous()
        broadcast(values, src, group)
        tensor.copy_(values)
