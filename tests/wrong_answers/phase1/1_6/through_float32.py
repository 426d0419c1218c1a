"""Sums in float32, whatever x is: float64 and int64 lose digits.

rejected by: test_naive_sums_every_kind
phrase: A cast on
"""

import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import all_reduce_naive as _all_reduce_naive


def all_reduce_naive(x: Tensor, group: dist.ProcessGroup | None = None) -> None:
    y = x.float()
    _all_reduce_naive(y, group)
    x.copy_(y)
