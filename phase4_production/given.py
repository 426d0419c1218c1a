"""What phase 4 gives you: types, and what its lessons take from other phases.

It contains no task, so leave it as it is. Submissions are graded with the course's own copy.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None: all ranks


class Loaded(NamedTuple):
    """A checkpoint that was loaded, and what was skipped on the way to it."""

    step: int
    state: dict[str, Any]
    path: Path
    skipped: dict[Path, str]  # newer, damaged -> the reason


EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, run it again


def group_device(group: Group = None) -> torch.device:
    """Return where tensors must be to travel in ``group``: this rank's GPU with NCCL, else CPU."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


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


Status = Literal["alive", "waiting", "slow", "silent"]


class Health(NamedTuple):
    """What a monitor knows of a rank."""

    rank: int
    step: int  # of its last report; -1: none yet
    silent_s: float  # since that was seen
    status: Status


class Store(Protocol):
    """What is used of the stores of torch.distributed: of a TCPStore, for example."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value, over an older one."""

    def get(self, key: str, /) -> bytes:
        """Return a value; wait until there is one, and raise after the store's timeout."""

    def check(self, keys: list[str], /) -> bool:
        """Tell at once whether all keys have values."""


class Reduced(NamedTuple):
    """What came of a gradient that was averaged over the ranks in compressed form.

    The mean over all ranks of what they ``sent`` is ``mean``: nothing else has travelled. What a
    rank's gradient has beyond ``sent`` was left behind.
    """

    mean: Tensor  # (n,); the same on all ranks, bit for bit
    sent: Tensor  # (n,); of this rank's gradient


class Piece(NamedTuple):
    """The gradient of one parameter, in a flat tensor that holds those of several."""

    name: str  # of the parameter
    shape: torch.Size


Reduce = Callable[[Tensor, Sequence[Piece]], Reduced]  # flat gradients, and what lies in them


class MetricWriter(Protocol):
    """A place for the numbers of a run.

    with contextlib.closing(JsonlWriter(path)) as writer:
        writer.write({"loss": 2.5, "samples_total": 4096}, step=1)
    """

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Take what was measured in a step."""

    def close(self) -> None:
        """Write what is left, and give back what was taken: files, threads, ports."""


class Record(NamedTuple):
    """What was measured in a step."""

    step: int
    metrics: dict[str, float]


class Exposed(NamedTuple):
    """What a step spends on communication: the mean over the steps of a trace."""

    step_s: float
    communication_s: float  # while anything was on its way
    exposed_s: float  # of it: while nothing was computed
