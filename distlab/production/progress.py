"""Progress of a run, and the steps since its last log line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.production.evaluation import Evaluation

if TYPE_CHECKING:
    from distlab.lessons import StepTimes


class Progress:
    """Steps, evaluated epochs and their results, as saved in each checkpoint.

    Attributes:
        step: Number of steps done.
        evaluated: Number of epochs done at the last evaluation.
        history: Epoch and result of each evaluation.
    """

    def __init__(self) -> None:
        self.step = self.evaluated = 0
        self.history: list[tuple[int, Evaluation]] = []

    @property
    def newest(self) -> Evaluation:
        """Result of the last evaluation; nothing is right before the first one."""
        return self.history[-1][1] if self.history else Evaluation(0.0, 0.0)

    def note(self, epoch: int, result: Evaluation) -> None:
        """Add an evaluation."""
        self.evaluated = epoch
        self.history.append((epoch, result))

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state."""
        history = [(epoch, *result) for epoch, result in self.history]
        return {"step": self.step, "evaluated": self.evaluated, "history": history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.step, self.evaluated = state["step"], state["evaluated"]
        self.history = [(epoch, Evaluation(*result)) for epoch, *result in state["history"]]


class ExactSteps:
    """Waits for the device in the steps that are timed in parts: a timer's ``synchronize``.

    A GPU's kernels may still run after the calls that start them return, and waiting for them in
    each step would slow training down, so on GPUs not all steps are exact. Whether a step is exact
    is known from its beginning to its end, although the count of steps rises before the end.
    """

    def __init__(self, wait: Callable[[], object], every: int, step: int) -> None:
        """Begin a step.

        Args:
            wait: Function that waits for the device.
            every: Steps whose number is a multiple of this are exact.
            step: Number of the step that begins.
        """
        self.wait, self.every = wait, every
        self.is_exact = step % every == 0

    def __call__(self) -> None:
        """Wait if this step is exact."""
        if self.is_exact:
            self.wait()

    @contextmanager
    def ending(self, *, next_step: int) -> Iterator[bool]:
        """Yield whether the step that ends is exact; both it and the next one wait in the block."""
        was_exact, is_next_exact = self.is_exact, next_step % self.every == 0
        self.is_exact = was_exact or is_next_exact
        yield was_exact
        self.is_exact = is_next_exact


class OfAllRanks(NamedTuple):
    """Sums and means over all ranks."""

    loss: float  # mean over the samples
    step_s: float  # mean over the interval's steps and the ranks
    bad_images: int


class Interval:
    """The steps since the last log line."""

    def __init__(self, device: torch.device) -> None:
        self.loss_sum = torch.zeros((), device=device, dtype=torch.float64)
        self.num_samples, self.num_steps, self.all_s = 0, 0, 0.0
        self.times: list[StepTimes] = []

    def add(self, loss_sum: Tensor, num_samples: int) -> None:
        """Add a step's loss and number of samples on this rank, without waiting for a GPU."""
        self.loss_sum += loss_sum
        self.num_samples += num_samples

    def add_times(self, times: StepTimes, *, is_exact: bool) -> None:
        """Add the times of a step; its parts count only if the times are exact."""
        self.num_steps += 1
        self.all_s += times.step_s
        if is_exact:
            self.times.append(times)

    def of_all_ranks(self, bad_images: int) -> OfAllRanks:
        """Return sums and means over all ranks, from one all-reduce; called on all ranks."""
        mine = [self.num_samples, self.all_s / max(self.num_steps, 1), bad_images]
        sums = torch.cat([self.loss_sum.view(1), self.loss_sum.new_tensor(mine)])
        dist.all_reduce(sums)
        loss_sum, num_samples, seconds, bad = sums.tolist()
        return OfAllRanks(
            loss_sum / max(num_samples, 1.0), seconds / dist.get_world_size(), round(bad)
        )

    def seconds(self) -> dict[str, float]:
        """Return the mean seconds of this rank's exactly timed steps and their parts; 0 if none."""
        names = ("step_s", "data_s", "compute_s", "communication_s")
        return {name: fmean([getattr(t, name) for t in self.times] or [0.0]) for name in names}
