"""The sum: N times too large.

rejected by: test_gradients_become_their_mean
phrase: That is the sum: divide by N
"""

from torch import nn

from solutions.phase1_data_parallel.collectives import AllReduce, Group, native_all_reduce
from solutions.phase1_data_parallel.trainer import _gradients


def average_gradients(
    module: nn.Module, all_reduce: AllReduce = native_all_reduce, group: Group = None
) -> None:
    for gradient in _gradients(module):
        total = gradient.contiguous()
        all_reduce(total, group)
        gradient.copy_(total)
