"""Sums in float32, whatever x is: float64 and int64 lose digits.

rejected by: test_doubling_sums_every_kind
phrase: A cast on
"""

import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import all_reduce_recursive_doubling as _doubling


def all_reduce_recursive_doubling(x: Tensor, group: dist.ProcessGroup | None = None) -> None:
    y = x.float().contiguous()
    _doubling(y, group)
    x.copy_(y)
