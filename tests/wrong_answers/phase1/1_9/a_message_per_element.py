"""Right values and bytes, in a message for every number.

rejected by: test_each_tensor_travels_once
phrase: Each message costs α
"""

from torch import nn

from solutions.phase1_data_parallel.collectives import Group, broadcast


def broadcast_parameters(module: nn.Module, src: int = 0, group: Group = None) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        values = tensor.detach().contiguous().reshape(-1)
        for element in values.split(1):
            broadcast(element, src, group)
        tensor.detach().copy_(values.view(tensor.shape))
