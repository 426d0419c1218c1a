"""What phase 4 gives you: types, and what its lessons take from other phases.

It contains no task, so leave it as it is. Submissions are graded with the course's own copy.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    numel: int  # elements of the whole tensor


class ShardsLoaded(NamedTuple):
    """A checkpoint whose shards were loaded, and what was skipped on the way to it."""

    step: int
    path: Path
    skipped: dict[Path, str]  # newer, damaged -> the reason


Status = Literal["alive", "waiting", "slow", "silent"]


class Health(NamedTuple):
    """What a monitor knows of a rank."""

    rank: int
    step: int  # step of its last report; -1 if there is none yet
    silent_s: float  # time since that report was seen
    status: Status


class Store(Protocol):
    """What is used of the stores of torch.distributed: of a TCPStore, for example."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value, over an older one."""

    def get(self, key: str, /) -> bytes:
        """Return a value; wait until there is one, and raise after the store's timeout."""

    def check(self, keys: list[str], /) -> bool:
        """Tell at once whether all keys have values."""


class HasState(Protocol):
    """Models, optimizers, schedulers, scalers, samplers: what has a state that one can load."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its tensors may be those that training changes."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take over a state that another object of this kind has returned."""


class Job(Protocol):
    """What is trained: a model, its optimizer, and whatever belongs to them."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to continue: it may share memory with the job.

        It is sent to other ranks, where tensors of a GPU come out on the GPU of the same number:
        return copies on the CPU.
        """

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on from a state."""

    def parameters(self) -> Iterable[Tensor]:
        """Return what is trained, in the same order on all ranks."""

    def add_gradients(self, samples: Sequence[int], epoch: int, /) -> None:
        """Add the gradients of the sum of the losses of these samples to each ``.grad``.

        Like ``backward``, it makes those that are None, and clears none.

        Args:
            samples: the samples, at least one.
            epoch: decides, with the sample, how it is augmented.
        """

    def step(self) -> None:
        """Change the parameters by what is in ``.grad``, and leave that as it is."""


class Reduced(NamedTuple):
    """What came of a gradient that was averaged over the ranks in compressed form.

    The mean over all ranks of what they ``sent`` is ``mean``: nothing else has travelled. What a
    rank's gradient has beyond ``sent`` was left behind.
    """

    mean: Tensor  # (n,); the same on all ranks, bit for bit
    sent: Tensor  # (n,); of this rank's gradient


class Piece(NamedTuple):
    """The gradient of one parameter, in a flat tensor that holds those of several."""

    name: str  # name of the parameter
    shape: torch.Size


Reduce = Callable[[Tensor, Sequence[Piece]], Reduced]  # flat gradients, and what lies in them


class Codec(Protocol):
    """Writes numbers with fewer bits."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes, uint8 of shape (b,), and the scale, float32 of shape ().

        b follows from the length of x alone, and grows with it.
        """

    def decode(self, payload: Tensor, scale: Tensor, n: int) -> Tensor:
        """Return the n numbers, float32, that the codes stand for; more bytes may follow these."""


Part = Literal["data", "compute", "communication"]  # part of a step


class StepTimes(NamedTuple):
    """Where the time of a step went, on one rank."""

    step_s: float
    data_s: float  # waited for the next batch
    compute_s: float
    communication_s: float  # waited for the network: what overlaps with computing is not in it

    @property
    def rest_s(self) -> float:
        """What is in none of the three parts: logging, for example."""
        return self.step_s - self.data_s - self.compute_s - self.communication_s


class Straggler(NamedTuple):
    """A rank that the others wait for."""

    rank: int  # rank in the group that is watched
    part: Literal["data", "compute"]  # the part that is slow
    ratio: float  # its own work over that of the median rank; 1 is usual


class Started(Protocol):
    """Something that is under way: torch's ``Work`` is one, and so is a future of torch.futures."""

    def wait(self) -> Any:
        """Return when it is done."""


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
    communication_s: float  # time with any message on its way
    exposed_s: float  # part of it without any computation
