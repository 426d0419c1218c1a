"""t.data = new: the same objects, in other memory.

rejected by: test_all_ranks_have_the_model_of_src
phrase: as after t.data
"""

from torch import nn

from solutions.phase1_data_parallel.collectives import Group, broadcast


def broadcast_parameters(module: nn.Module, src: int = 0, group: Group = None) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        values = tensor.detach().clone().contiguous()
        broadcast(values, src, group)
        tensor.data = values
