"""Calls the naive all-reduce.

rejected by: test_doubling_takes_logarithmically_many_rounds
phrase: rounds
"""

from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group, all_reduce_naive


def all_reduce_recursive_doubling(x: Tensor, group: Group = None) -> None:
    all_reduce_naive(x, group)
