"""What the programs of this folder share: the course's functions, and comparing."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab import chosen


def load(name: str, *tasks: str) -> ModuleType:
    """Import a lesson: yours if you have written these tasks, otherwise the solution."""
    try:
        submitted, whose = chosen.find("mine", tasks), "yours"
    except chosen.NotThereError as unwritten:
        chosen.check_solutions(instead=str(unwritten))
        submitted, whose = chosen.find("solution", tasks), "the solution"
    say(f"{name}: {whose}")
    return chosen.lesson(submitted, name)


def say(line: str) -> None:
    """Print a line once, on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def gradients(model: nn.Module) -> list[Any]:
    """Return the gradients of a model's parameters: tensors, or DTensors."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def compare(what: str, ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """Say how far apart two lists of tensors are, on the rank where they differ most.

    They are called equal if they differ by less than a millionth of the largest number.
    """
    of_ours, of_theirs = (torch.cat([x.detach().flatten() for x in xs]) for xs in (ours, theirs))
    numbers = torch.stack([(of_ours - of_theirs).abs().max(), of_theirs.abs().max()])
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    difference, largest = numbers.tolist()
    is_equal = difference < 1e-6 * largest or difference == 0
    say(f"{what}: {'equal' if is_equal else f'up to {difference:.2g} apart'}")
