"""A small training run that dies at a chosen moment, and the events that it logs."""

import json
import signal
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from distlab import chosen
from distlab.chaos.bits import digest
from distlab.grade.submission import Submission

BALLAST_BYTES = 4 * 2**20  # makes a save take milliseconds, so that kills can hit it


class Training(NamedTuple):
    """A training run, and the functions that save its state.

    Attributes:
        lessons: Submission with ``save_checkpoint`` and ``load_checkpoint``.
        folder: Folder of the checkpoints.
    """

    lessons: Submission
    folder: Path
    world_size: int = 2
    num_steps: int = 160
    save_every: int = 8

    @property
    def lesson(self) -> Any:
        """The lesson whose functions save and load checkpoints."""
        return chosen.lesson(self.lessons, "checkpoint")


class Death(NamedTuple):
    """The moment at which a rank dies.

    Attributes:
        rank: Rank that dies.
        seconds: Delay before its death.
        save: Number of the save at which the delay starts, counted from 1; 0 for the start of the
            training.
    """

    rank: int
    seconds: float
    save: int = 0


class Event(NamedTuple):
    """An event on rank 0: it has loaded, is about to save, or has saved the state after a step."""

    what: Literal["loaded", "saving", "saved"]
    step: int
    at_s: float  # seconds since training started
    digest: str = ""


def events(log: Path) -> list[Event]:
    """Return the events in a log, which holds those of one start of the training run."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [Event(*json.loads(line)) for line in lines]


def train(training: Training, log: Path, death: Death | None) -> float:
    """Train on one rank, from the newest checkpoint to the end; return the seconds taken."""
    torch.set_num_threads(1)
    run = _Run(training, log, death)
    run.to_the_end()
    die_after(0)  # disarms the timer
    return run.now_s


def die_after(seconds: float) -> None:
    """Have the kernel kill this process after a delay; 0 disarms the timer.

    No Python code runs at that point, because SIGALRM has its default effect, which is to kill.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


class _Run:
    """One rank of a training run: its model, optimizer and random generator."""

    def __init__(self, training: Training, log: Path, death: Death | None) -> None:
        self.training, self.log, self.lesson = training, log, training.lesson
        self.begun_s, self.num_saves = time.monotonic(), 0
        self.death = death if death and death.rank == dist.get_rank() else None
        self.generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self.model = nn.Linear(8, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self._maybe_die()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.begun_s

    def to_the_end(self) -> None:
        first = self._load()
        for step in range(first + 1, self.training.num_steps + 1):
            self._step()
            if step % self.training.save_every == 0 or step == self.training.num_steps:
                self._save(step)

    def _maybe_die(self) -> None:
        if self.death and self.death.save == self.num_saves:
            die_after(max(self.death.seconds, 1e-6))

    def _load(self) -> int:
        """Load the newest checkpoint on all ranks, and return its step, or 0 if there is none."""
        loaded = self.lesson.load_checkpoint(self.training.folder)
        if loaded is not None:
            self.model.load_state_dict(loaded.state["model"])
            self.optimizer.load_state_dict(loaded.state["optimizer"])
            self.generator.set_state(loaded.state["generator"])
        step = loaded.step if loaded else 0
        self._note("loaded", step)
        return int(step)

    def _step(self) -> None:
        """Take a step with averaged gradients; the random inputs depend on all earlier draws."""
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
            self._note("saving", step)
            self.num_saves += 1
            self._maybe_die()
            self.lesson.save_checkpoint(state, self.training.folder, step)
            self._note("saved", step, digest(state))
        dist.barrier()  # keeps other ranks from running ahead of the checkpoint

    def _note(self, *event: object) -> None:
        """Append an event to the log, unbuffered, so that a later kill cannot lose it."""
        if dist.get_rank() == 0:
            what, step, *digests = event
            line = json.dumps([what, step, self.now_s, *digests])
            with open(self.log, "ab", buffering=0) as file:
                file.write(f"{line}\n".encode())


class Left(NamedTuple):
    """The checkpoint that the next start of a training run will find."""

    step: int = 0  # 0 if there is no checkpoint
    digest: str = ""
    damaged: str = ""  # newer checkpoints that were skipped, with the reasons
    error: str = ""


def look(training: Training) -> Left:
    """Load and describe the checkpoint that the next start will find."""
    try:
        loaded = training.lesson.load_checkpoint(training.folder)
    except Exception as error:
        return Left(error=f"{type(error).__name__}: {error}")
    if loaded is None:
        return Left()
    damaged = "; ".join(f"{path.name}: {why}" for path, why in loaded.skipped.items())
    return Left(int(loaded.step), digest(loaded.state), damaged)
