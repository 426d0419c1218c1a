"""Bodies for task 4.6: a job that notes what it is given, and workers that are interrupted."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phase4_production.given import Group, Loaded

SAVE_S = 5e-3
LR, MOMENTUM = 0.1, 0.9
DAMAGED = "all checkpoints are damaged: state.pt of step 3 has 17 bytes, not 1234"
FULL = "No space left on device"


class Plan(NamedTuple):
    """A run, and what happens to the workers of one start.

    Attributes:
        ends: what ends them early: an error before or after the parameters have changed, or a
            request to stop; "": nothing.
        at: in or after which step of this start.
        fails: what fails on rank 0: "load", "save" or nothing.
    """

    num_samples: int = 23
    global_batch: int = 5
    num_epochs: int = 3
    save_every: int = 2
    micro_batch: int = 2
    seed: int = 0
    width: int = 3  # of the model
    ends: str = ""
    at: int = 0
    fails: str = ""

    @property
    def sizes(self) -> list[int]:
        """How many samples each step of the whole run has."""
        num_full, rest = divmod(self.num_samples, self.global_batch)
        return ([self.global_batch] * num_full + [rest] * (rest > 0)) * self.num_epochs

    @property
    def steps_per_epoch(self) -> int:
        """The last of them may be short."""
        return -(-self.num_samples // self.global_batch)


class Interrupted(RuntimeError):
    """Stands for what a collective raises when another rank has died."""


class Model:
    """A linear model with momentum, whose gradients are written down by hand.

    Attributes:
        steps: for each step, the calls of ``add_gradients`` in it: epoch and samples.
        times_s: of what was done in each step.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.weights = torch.full((plan.width,), 1.0 + rank, dtype=torch.float64)
        self.bias = torch.tensor(0.5 * rank, dtype=torch.float64)
        self.speeds = [torch.zeros_like(one) for one in self.parameters()]
        if rank % 2:  # "need not be cleared"
            for parameter in self.parameters():
                parameter.grad = torch.ones_like(parameter)
        self.steps: list[list[tuple[int, list[int]]]] = [[]]
        self.times_s: list[list[float]] = [[]]

    def parameters(self) -> list[Tensor]:
        return [self.weights, self.bias]

    def state_dict(self) -> dict[str, Any]:
        return {"parameters": self.parameters(), "speeds": self.speeds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mine, other = self.state_dict(), dict(state)
        for name, tensors in mine.items():
            for tensor, value in zip(tensors, other[name], strict=True):
                tensor.copy_(value)

    def add_gradients(self, samples: Sequence[int], epoch: int) -> None:
        self.times_s[-1].append(time.monotonic())
        given = [int(sample) for sample in samples]
        self.steps[-1].append((int(epoch), given))
        gradients = gradients_of(self.parameters(), given, epoch)
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient

    def step(self) -> None:
        self.times_s[-1].append(time.monotonic())
        is_interrupted = len(self.steps) == self.plan.at
        if is_interrupted and self.plan.ends == "before":
            raise Interrupted("Connection closed by peer")
        self.move([one.grad for one in self.parameters()])
        if is_interrupted and self.plan.ends == "after":
            raise Interrupted("Connection closed by peer")
        self.steps.append([])
        self.times_s.append([])

    def move(self, gradients: Sequence[Any]) -> None:
        """Change the parameters by the mean gradients of a step."""
        for one, speed, gradient in zip(self.parameters(), self.speeds, gradients, strict=True):
            speed.mul_(MOMENTUM).add_(gradient)
            one.sub_(LR * speed)

    def flat(self) -> list[float]:
        """The parameters, as numbers."""
        return [*self.weights[:8].tolist(), self.bias.item()]


def gradients_of(
    parameters: Sequence[Tensor], samples: Sequence[int], epoch: int
) -> tuple[Tensor, Tensor]:
    """The gradients of the sum of the squared errors of these samples."""
    weights, bias = parameters
    places = torch.arange(1, len(weights) + 1, dtype=torch.float64)
    numbers = torch.tensor(samples, dtype=torch.float64)
    x = torch.sin(0.37 * (numbers[:, None] + 1) * places + epoch) / len(weights) ** 0.5
    errors = x @ weights + bias - torch.cos(1.3 * numbers)
    return errors @ x, errors.sum()


def replay(plan: Plan, steps: Sequence[tuple[int, Sequence[int]]]) -> list[float]:
    """The parameters after these steps, epoch and samples of each, on one rank."""
    model = Model(plan, 0)
    for epoch, samples in steps:
        gradients = gradients_of(model.parameters(), samples, epoch)
        model.move([gradient / len(samples) for gradient in gradients])
    return model.flat()


def start(lesson: Any, root: str, plan: Plan, group: Group = None) -> dict[str, Any]:
    """Be a worker, from one start to its end.

    Returns:
        How it ended, its steps and times, its parameters, and what was saved, loaded and asked.
    """
    rank = dist.get_rank(group)
    torch.manual_seed(1000 * dist.get_world_size(group) + rank)  # no order may depend on this
    folder, model = Path(root), Model(plan, rank)
    saves: list[tuple[int, float]] = []
    asked: list[int] = []

    def save(state: Mapping[str, Any], where: Path, step: int) -> Path:
        if plan.fails == "save":
            raise OSError(FULL)
        time.sleep(SAVE_S)
        path = Path(where) / f"step-{step:08d}"
        torch.save(dict(state), path)
        saves.append((int(step), time.monotonic()))
        return path

    def load(where: Path) -> Loaded | None:
        if plan.fails == "load" and rank == 0:
            raise RuntimeError(DAMAGED)
        found = sorted(Path(where).glob("step-*"))
        if rank > 0:
            found = [] if rank % 2 else found[:-1]  # an older list of files
        if not found:
            return None
        return Loaded(step_of(found[-1]), torch.load(found[-1], weights_only=True), found[-1], {})

    def should_stop() -> bool:
        asked.append(len(model.steps) - 1)
        return plan.ends == "stop" and asked[-1] == plan.at

    ended: Any = None
    try:
        ended = lesson.run_elastic(
            model,
            folder,
            num_samples=plan.num_samples,
            global_batch=plan.global_batch,
            num_epochs=plan.num_epochs,
            save_every=plan.save_every,
            micro_batch=plan.micro_batch,
            save=save,
            load=load,
            should_stop=should_stop,
            **({"seed": plan.seed} if plan.seed else {}),
            **({"group": group} if group else {}),
        )
    except Interrupted:
        ended = "interrupted"
    except SystemExit as exit:
        ended = f"exit {exit.code}"
    except RuntimeError as error:
        if not plan.fails:
            raise
        ended = f"RuntimeError: {error}"
    except OSError as error:
        if not plan.fails:
            raise
        ended = f"OSError: {error}"
    is_open = ended == "interrupted"  # the step that was begun is one of those
    return {
        "ended": ended,
        "steps": model.steps if is_open or model.steps[-1] else model.steps[:-1],
        "times_s": model.times_s,
        "left_s": time.monotonic(),
        "parameters": model.flat(),
        "saves": saves,
        "asked": asked,
    }


def reduce_once(lesson: Any, numel: int) -> None:
    """Let gradients of that size travel once: what that takes is counted."""
    dist.all_reduce(torch.zeros(numel, dtype=torch.float64))


def step_of(path: Path) -> int:
    """The step of a checkpoint, by its name."""
    return int(path.name.removeprefix("step-"))
