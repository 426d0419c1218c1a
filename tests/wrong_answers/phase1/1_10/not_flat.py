"""Flat in name only: one message per parameter.

rejected by: test_the_number_of_all_reduces
phrase: flat means one bucket
"""

from torch import nn

from solutions.phase1_data_parallel.collectives import AllReduce, Group, native_all_reduce
from solutions.phase1_data_parallel.trainer import average_gradients


def average_gradients_flat(
    module: nn.Module, all_reduce: AllReduce = native_all_reduce, group: Group = None
) -> None:
    average_gradients(module, all_reduce, group)
