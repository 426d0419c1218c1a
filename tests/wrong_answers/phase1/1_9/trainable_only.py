"""Frozen parameters are skipped.

rejected by: test_all_ranks_have_the_model_of_src
phrase: frozen
"""

from torch import nn

from solutions.phase1_data_parallel.collectives import Group, broadcast


def broadcast_parameters(module: nn.Module, src: int = 0, group: Group = None) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.requires_grad or not isinstance(tensor, nn.Parameter):
            values = tensor.detach().contiguous()
            broadcast(values, src, group)
            tensor.detach().copy_(values)
