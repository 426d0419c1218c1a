"""New parameters in place of those that the optimizer holds.

rejected by: test_all_ranks_have_the_model_of_src
phrase: which the optimizer holds
"""

from torch import nn

from solutions.phase1_data_parallel.collectives import Group, broadcast


def broadcast_parameters(module: nn.Module, src: int = 0, group: Group = None) -> None:
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            values = parameter.detach().clone().contiguous()
            broadcast(values, src, group)
            setattr(part, name, nn.Parameter(values, requires_grad=parameter.requires_grad))
        for _, buffer in part.named_buffers(recurse=False):
            broadcast(buffer, src, group)
