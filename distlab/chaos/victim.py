"""A small training whose processes are killed at any moment, and what it tells meanwhile."""

import hashlib
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from distlab import chosen
from distlab.grade.submission import Submission

PHASE_4 = "phase4_production"
BALLAST_BYTES = 4 * 2**20  # a save takes some milliseconds, so that kills hit it
PATIENCE = timedelta(seconds=60)


class Training(NamedTuple):
    """What is trained, and who saves it.

    Attributes:
        lessons: whose ``save_checkpoint`` and ``load_checkpoint``.
        folder: of the checkpoints.
    """

    lessons: Submission
    folder: Path
    world_size: int = 2
    num_steps: int = 160
    save_every: int = 8


class Told(NamedTuple):
    """What rank 0 says: it has loaded, begins to save, or has saved the state after a step."""

    what: Literal["loaded", "saving", "saved"]
    step: int
    digest: str = ""


def train(training: Training, rank: int, meeting: Path, log: Path, teller: Connection) -> None:
    """Train in a process of its own, from the newest checkpoint to the end.

    Args:
        meeting: a file through which the ranks find each other; it is not there yet.
        log: where the errors go of a rank that loses its partner.
        teller: takes what rank 0 says.
    """
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=training.world_size,
        timeout=PATIENCE,
    )
    _Run(training, teller).to_the_end()
    dist.destroy_process_group()


class _Run:
    """Model, optimizer and generator of a rank, and where they stand."""

    def __init__(self, training: Training, teller: Connection) -> None:
        self.training, self.teller = training, teller
        self.lesson: Any = chosen.lesson(training.lessons, "checkpoint")
        self.generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self.model = nn.Linear(8, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)

    def to_the_end(self) -> None:
        first = self._load()
        for step in range(first + 1, self.training.num_steps + 1):
            self._step()
            if step % self.training.save_every == 0 or step == self.training.num_steps:
                self._save(step)

    def _load(self) -> int:
        """Go on from the newest checkpoint; all ranks read it themselves."""
        loaded = self.lesson.load_checkpoint(self.training.folder)
        if loaded is not None:
            self.model.load_state_dict(loaded.state["model"])
            self.optimizer.load_state_dict(loaded.state["optimizer"])
            self.generator.set_state(loaded.state["generator"])
        step = loaded.step if loaded else 0
        self._tell(Told("loaded", step))
        return int(step)

    def _step(self) -> None:
        """Average the gradients of all ranks; what a rank draws depends on all draws before."""
        x = torch.randn(dist.get_world_size(), 16, 8, generator=self.generator)[dist.get_rank()]
        self.optimizer.zero_grad()
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        self.optimizer.step()

    def _save(self, step: int) -> None:
        if dist.get_rank() == 0:
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "generator": self.generator.get_state(),
                "ballast": torch.full((BALLAST_BYTES // 4,), step, dtype=torch.int32),
            }
            self._tell(Told("saving", step))
            self.lesson.save_checkpoint(state, self.training.folder, step)
            self._tell(Told("saved", step, digest(state)))
        dist.barrier()  # no rank is ahead of what is saved

    def _tell(self, told: Told) -> None:
        if dist.get_rank() == 0:
            self.teller.send(told)


class Left(NamedTuple):
    """What the next start of a training will find."""

    step: int = 0  # 0: nothing
    digest: str = ""
    damaged: str = ""  # the checkpoints that were skipped, with the reasons
    error: str = ""


def look(training: Training, advance: object) -> Left:
    """Load as the next start will."""
    lesson: Any = chosen.lesson(training.lessons, "checkpoint")
    try:
        loaded = lesson.load_checkpoint(training.folder)
    except Exception as error:
        return Left(error=f"{type(error).__name__}: {error}")
    if loaded is None:
        return Left()
    damaged = "; ".join(f"{path.name}: {why}" for path, why in loaded.skipped.items())
    return Left(int(loaded.step), digest(loaded.state), damaged)


def digest(state: object) -> str:
    """Return a hash of all names, numbers and bits in a state."""
    found = hashlib.sha256()
    _add(found, state)
    return found.hexdigest()


def _add(found: Any, part: object) -> None:
    if isinstance(part, torch.Tensor):
        found.update(f"{part.dtype} {tuple(part.shape)}".encode())
        found.update(part.detach().contiguous().view(-1).view(torch.uint8).numpy())
    elif isinstance(part, Mapping):
        for key, value in part.items():
            found.update(repr(key).encode())
            _add(found, value)
    elif isinstance(part, list | tuple):
        for value in part:
            _add(found, value)
    else:
        found.update(repr(part).encode())
