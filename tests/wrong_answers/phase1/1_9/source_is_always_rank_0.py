"""src is not passed on.

rejected by: test_all_ranks_have_the_model_of_src
phrase: after a broadcast from rank 2
"""

from torch import nn

from solutions.phase1_data_parallel.collectives import Group, broadcast


def broadcast_parameters(module: nn.Module, src: int = 0, group: Group = None) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        values = tensor.detach().contiguous()
        broadcast(values, 0, group)
        tensor.detach().copy_(values)
