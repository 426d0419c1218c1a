"""Bodies (functions that ranks run) for task 4.6: a job that records its calls, and its workers."""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from judging.calls import typed
from judging.tensors import given_group
from phase4_production.given import Group, Loaded

SAVE_S = 5e-3
DAMAGED = "all checkpoints are damaged: state.pt of step 3 has 17 bytes, not 1234"
FULL = "No space left on device"
OPTIONS = ("num_samples", "global_batch", "num_epochs", "save_every", "micro_batch")


class Plan(NamedTuple):
    """A training run, and how one start of its workers ends."""

    num_samples: int = 23
    global_batch: int = 5
    num_epochs: int = 3
    save_every: int = 2
    micro_batch: int = 2
    seed: int = 0
    width: int = 3  # number of the model's weights
    # How the workers end early: by an error "before" or "after" the parameters change, or by a
    # request to "stop"; "" if they do not.
    ends: str = ""
    at: int = 0  # step, counted from this start, in or after which the workers end
    fails: str = ""  # function that fails on rank 0: "load", "save" or ""

    @property
    def sizes(self) -> list[int]:
        """The number of samples in each step of the whole run."""
        num_full, rest = divmod(self.num_samples, self.global_batch)
        return ([self.global_batch] * num_full + [rest] * (rest > 0)) * self.num_epochs

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps per epoch, the last of which may have fewer samples."""
        return -(-self.num_samples // self.global_batch)


class Interrupted(RuntimeError):
    """The error that a collective raises when another rank has died."""


class Model:
    """A linear model, trained with momentum."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.linear = plan, nn.Linear(plan.width, 1, dtype=torch.float64)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 1.0 + rank)
            if rank % 2:  # the contract allows stale gradients
                parameter.grad = torch.ones_like(parameter)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        # Epoch and samples of each call of ``add_gradients``, by step.
        self.steps: list[list[tuple[int, list[int]]]] = [[]]
        self.times_s: list[list[float]] = [[]]  # times of all calls, by step

    def parameters(self) -> list[nn.Parameter]:
        return [*self.linear.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"linear": self.linear.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.linear.load_state_dict(state["linear"])
        self.optimizer.load_state_dict(deepcopy(state["optimizer"]))

    def loss(self, samples: Sequence[int], epoch: int) -> Tensor:
        """Return half the sum of the squared errors on these samples."""
        numbers = torch.tensor(samples, dtype=torch.float64)
        places = torch.arange(1, self.plan.width + 1)
        x = torch.sin(0.37 * (numbers[:, None] + 1) * places + epoch) / self.plan.width**0.5
        errors: Tensor = self.linear(x)[:, 0] - torch.cos(1.3 * numbers)
        return errors.square().sum() / 2

    def add_gradients(self, samples: Sequence[int], epoch: int) -> None:
        self.times_s[-1].append(time.monotonic())
        given = [int(sample) for sample in samples]
        self.steps[-1].append((int(epoch), given))
        self.loss(given, epoch).backward()

    def step(self) -> None:
        self.times_s[-1].append(time.monotonic())
        is_interrupted = len(self.steps) == self.plan.at
        if is_interrupted and self.plan.ends == "before":
            raise Interrupted("Connection closed by peer")
        self.optimizer.step()
        if is_interrupted and self.plan.ends == "after":
            raise Interrupted("Connection closed by peer")
        self.steps.append([])
        self.times_s.append([])

    def flat(self) -> list[float]:
        """Return the first weights and the bias."""
        return [*self.linear.weight[0, :8].tolist(), self.linear.bias.item()]


def replay(plan: Plan, steps: Sequence[tuple[int, Sequence[int]]]) -> list[float]:
    """Take steps in one process, given the epoch and samples of each; return the parameters."""
    model = Model(plan, 0)
    for epoch, samples in steps:
        model.optimizer.zero_grad()
        (model.loss(samples, epoch) / len(samples)).backward()
        model.optimizer.step()
    return model.flat()


class Worker:
    """Functions to pass to ``run_elastic``, which record how they are called."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.job = plan, rank, Model(plan, rank)
        self.saves: list[tuple[int, float]] = []
        self.asked: list[int] = []

    def save(self, state: Mapping[str, Any], where: Path, step: int) -> Path:
        if self.plan.fails == "save":
            raise OSError(FULL)
        time.sleep(SAVE_S)
        path = Path(where) / f"step-{step:08d}"
        torch.save(dict(state), path)
        self.saves.append((int(step), time.monotonic()))
        return path

    def load(self, where: Path) -> Loaded | None:
        if self.plan.fails == "load" and self.rank == 0:
            raise RuntimeError(DAMAGED)
        files = sorted(Path(where).glob("step-*"))
        if self.rank > 0:  # these ranks see an outdated list of files
            files = [] if self.rank % 2 else files[:-1]
        if not files:
            return None
        state = torch.load(files[-1], map_location="cpu", weights_only=True)
        return Loaded(step_of(files[-1]), state, files[-1], {})

    def should_stop(self) -> bool:
        self.asked.append(len(self.job.steps) - 1)
        return self.plan.ends == "stop" and self.asked[-1] == self.plan.at

    def end_of(self, run: Callable[[], object]) -> Any:
        """Return the result of ``run``, or a description of how it ended early."""
        try:
            return typed("run_elastic", run(), int)
        except Interrupted:
            return "interrupted"
        except SystemExit as exit:
            return f"exit {exit.code}"
        except (RuntimeError, OSError) as error:
            if not self.plan.fails:
                raise
            return f"{'OSError' if isinstance(error, OSError) else 'RuntimeError'}: {error}"


def start(lesson: Any, root: str, plan: Plan, group: Group = None) -> dict[str, Any]:
    """Run a worker from its start to its end; return what was observed."""
    rank, folder = dist.get_rank(group), Path(root)
    # The order of samples must not depend on the global generator.
    torch.manual_seed(1000 * dist.get_world_size(group) + rank)
    folder.mkdir(exist_ok=True)
    worker = Worker(plan, rank)
    options = {name: getattr(plan, name) for name in OPTIONS} | given_group(group)
    options |= {"seed": plan.seed} if plan.seed else {}
    options |= {name: getattr(worker, name) for name in ("save", "load", "should_stop")}
    ended = worker.end_of(lambda: lesson.run_elastic(worker.job, folder, **options))
    steps, is_open = worker.job.steps, ended == "interrupted"  # an interrupted step counts, too
    return {
        "ended": ended,
        "steps": steps if is_open or steps[-1] else steps[:-1],
        "times_s": worker.job.times_s,
        "left_s": time.monotonic(),
        "parameters": worker.job.flat(),
        "saves": worker.saves,
        "asked": worker.asked,
    }


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))
