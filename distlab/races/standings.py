"""Simulated runs of a learner's all-reduce, and the table of times."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import distlab
from distlab import launch
from distlab.course import Challenge
from distlab.grade.outcomes import verdict_on
from distlab.grade.running import on_rank
from distlab.grade.submission import Submission
from distlab.launch import LaunchError
from distlab.sim import Cluster, Options, Simulated
from distlab.util.text import counted

RIVALS = ("recursive_doubling", "tree", "halving_doubling", "ring", "hierarchical")
YOURS = "yours"
# CPU time and idle time detect hangs; wall-clock time would be unreliable on a busy machine.
LIMITS = launch.Limits(timeout_s=1200.0, cpu_s=60.0, idle_s=60.0)
Wrong = tuple[int, float, float]  # (index, value, right value)


class ChallengeError(Exception):
    """The submission is not an all-reduce that uses only messages; the error's text says why."""


@dataclass(frozen=True)
class Standings:
    """Times of the learner's function and its rivals, such as ``seconds["yours"][0]``.

    Attributes:
        title: Cluster to which all columns belong; "" if each column is a cluster.
        columns: Clusters or sizes, as printed.
        seconds: Times by name, one per column.
        baseline: Name whose speedup is 1.
    """

    title: str
    columns: tuple[str, ...]
    seconds: Mapping[str, tuple[float, ...]]
    baseline: str

    def speedup(self, name: str) -> float:
        """Return the speedup over the baseline, as the geometric mean over the columns."""
        pairs = zip(self.seconds[self.baseline], self.seconds[name], strict=True)
        return prod(base / seconds for base, seconds in pairs) ** (1 / len(self.columns))


def figure(tables: tuple[Standings, ...]) -> float:
    """Return the learner's speedup: the geometric mean over tables with equally many columns."""
    return float(prod(table.speedup(YOURS) for table in tables) ** (1 / len(tables)))


def between(numbers: Random, limits: tuple[float, float]) -> float:
    """Draw a log-uniform number between the limits."""
    low, high = limits
    return float(low * (high / low) ** numbers.random())


def numbers_of_rank(num_elements: int, rank: int) -> Tensor:
    """Return 2^rank times 1, 2, …, 8, 1, …, so that sums in float32 are exact in any order."""
    return (torch.arange(num_elements) % 8 + 1).float() * 2.0**rank


def first_wrong(x: Tensor, num_ranks: int) -> Wrong | None:
    """Return the first element that is not the sum of all ranks' numbers, or None."""
    right = numbers_of_rank(x.numel(), 0) * (2.0**num_ranks - 1)
    wrong = (x != right).nonzero()
    if not len(wrong):
        return None
    element = int(wrong[0])
    return element, float(x[element]), float(right[element])


def refuse_wrong(rank: int, wrong: Wrong | None, num_ranks: int, num_elements: int) -> None:
    """Raise a ChallengeError if a rank has found a wrong element."""
    if wrong is not None:
        element, value, right = wrong
        raise ChallengeError(
            f"of {num_ranks} ranks with {counted(num_elements, 'number')} each, element {element} "
            f"of rank {rank} should be {right:g}, but is {value:g}. It must be the sum over all "
            "ranks, for any number of them and of elements."
        )


def simulated(
    handed_in: Submission,
    challenge: Challenge,
    body: Callable[..., Any],
    args: tuple[object, ...],
    cluster: Cluster,
    sizes: str,
) -> Simulated[Any]:
    """Run ``body`` with the learner's lesson on every rank of a cluster.

    Args:
        body: Function called with the lesson, the name of the challenge's function, and ``args``.
        sizes: Description of the summed sizes, for error messages.

    Raises:
        ChallengeError: The learner's function raised an error or hung.
    """
    try:
        return launch.simulate(
            *(on_rank, cluster.num_gpus, handed_in, challenge, body),
            (challenge.function, *args),
            cluster=cluster,
            options=Options(given=(str(Path(distlab.__file__).parent),), is_strict=True),
            limits=LIMITS,
            plain_results=True,
        )
    except LaunchError as error:
        verdict = verdict_on(error)
        if verdict.missing:
            missing = verdict.missing[0]
            raise ChallengeError(
                f"{challenge.function} calls the function of task {missing}, which is not written "
                f"yet: write it, or replace the call in {challenge.template}"
            ) from None
        where = f"{counted(cluster.num_gpus, 'rank')}, {sizes}"
        text = f"{challenge.function} on {where}: {verdict.message}\n{verdict.details}"
        raise ChallengeError(text.rstrip()) from None
