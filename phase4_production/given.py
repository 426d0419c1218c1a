"""What phase 4 gives you: types, and what its lessons take from other phases.

It contains no task, so leave it as it is. Submissions are graded with the course's own copy.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None: all ranks


class Loaded(NamedTuple):
    """A checkpoint that was loaded, and what was skipped on the way to it."""

    step: int
    state: dict[str, Any]
    path: Path
    skipped: dict[Path, str]  # newer, damaged -> the reason


# anchor 4.2
# end 4.2


# anchor 4.3
class Shard(NamedTuple):
    """Elements ``start`` to ``start + len(values)`` of a tensor that was flattened."""

    values: Tensor  # (n,); n may be 0
    start: int
    numel: int  # of the whole tensor


class ShardsLoaded(NamedTuple):
    """A checkpoint whose shards were loaded, and what was skipped on the way to it."""

    step: int
    path: Path
    skipped: dict[Path, str]  # newer, damaged -> the reason


# end 4.3


# anchor 4.4
# end 4.4


# anchor 4.5
# end 4.5


# anchor 4.6
# end 4.6


# anchor 4.7
# end 4.7


# anchor 4.8
# end 4.8


# anchor 4.9
# end 4.9


# anchor 4.10
# end 4.10


# anchor 4.11
# end 4.11


# anchor 4.12
# end 4.12


# anchor 4.13
# end 4.13


# anchor 4.14
# end 4.14


# anchor 4.15
# end 4.15


# anchor 4.16
# end 4.16


# anchor 4.17
# end 4.17


# anchor 4.18
# end 4.18
