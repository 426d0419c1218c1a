"""Half the bytes, and half of the digits are lost.

rejected by: test_broadcast_from_every_rank_of_every_kind
phrase: a cast loses digits
"""

import torch
import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import broadcast as _broadcast


def broadcast(x: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    y = x.to(torch.float16)
    _broadcast(y, src, group)
    if dist.get_rank(group) != src:
        x.copy_(y)
