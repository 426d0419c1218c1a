"""The catalogue of broken and correct programs, and the helpers that they share.

Each broken program makes one mistake, and its entry states what the report must say. Read them as
a catalogue of ways to hang: in real processes over gloo, these programs fail too, and most of them
hang.

Correct programs look as if they might hang, but do not. The entry states what every rank returns,
with or without buffered sends, in whatever order the ranks take turns. Real processes over gloo
return the same results, except for four programs that gloo cannot run; their docstrings say so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.sim import Deadlock, Faults, Mismatch, RankError, SimulationError

Program = Callable[[], object]

CYCLE = "send/recv cycle"
MISSING = "missing rank"
ORDER = "order mismatch"
KEY = "key never set"
THREAD = "thread wait"
ENDED = "peer ended"
OPERATION = "operation mismatch"
SHAPE = "shape or dtype mismatch"
PASSES = "passes"


@dataclass(frozen=True)
class Broken:
    """A program that makes a mistake, and what its report must say.

    Attributes:
        error: Class of the error.
        num_ranks: Size of the world.
        kind: Kind of the error; for a RankError, the name of the exception.
        ranks: Ranks to blame: all of them for a Deadlock, otherwise at least these.
        says: Phrases that the message must contain.
        never: Phrases that the message must not contain.
        if_buffered: Kind of the error if sends are buffered; "" if it stays the same.
        faults: Faults to simulate.
    """

    program: Program
    error: type[SimulationError]
    num_ranks: int
    kind: str
    ranks: tuple[int, ...]
    says: tuple[str, ...]
    never: tuple[str, ...] = ()
    if_buffered: str = ""
    faults: Faults = field(default_factory=Faults)

    @property
    def name(self) -> str:
        return self.program.__name__

    def right_kind(self, *, is_buffered: bool) -> str:
        return (is_buffered and self.if_buffered) or self.kind


BROKEN: list[Broken] = []


def _entry(error: type[SimulationError]) -> Callable[..., Callable[[Program], Program]]:
    """Return a decorator that adds a program to the catalogue as one that must raise this error."""

    def decorator(
        num_ranks: int, kind: str, ranks: tuple[int, ...], *says: str, **others: Any
    ) -> Callable[[Program], Program]:
        def enter(program: Program) -> Program:
            BROKEN.append(Broken(program, error, num_ranks, kind, ranks, says, **others))
            return program

        return enter

    return decorator


deadlock = _entry(Deadlock)
mismatch = _entry(Mismatch)
rank_error = _entry(RankError)


@dataclass(frozen=True)
class Correct:
    """A program and its result on each rank."""

    program: Program
    results: list[object]
    faults: Faults = field(default_factory=Faults)

    @property
    def name(self) -> str:
        return self.program.__name__


CORRECT: list[Correct] = []


def returns(
    results: Sequence[object], faults: Faults | None = None
) -> Callable[[Program], Program]:
    """Return a decorator that adds a correct program, which runs on one rank per result."""

    def enter(program: Program) -> Program:
        CORRECT.append(Correct(program, list(results), faults or Faults()))
        return program

    return enter


# Helpers for programs


def me() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def data(count: int = 4) -> Tensor:
    return torch.full((count,), float(me()))


def value(number: float) -> Tensor:
    return torch.tensor([float(number)])


def empty() -> Tensor:
    return torch.zeros(1)


def received(src: int | None = None, tag: int = 0) -> float:
    """Receive one number."""
    x = empty()
    dist.recv(x, src, tag=tag)
    return x.item()


def reduced(number: float, group: dist.ProcessGroup | None = None) -> float:
    """Return the sum of the ranks' numbers."""
    x = value(number)
    dist.all_reduce(x, group=group)
    return x.item()
