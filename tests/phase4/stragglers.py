"""Bodies for task 4.16, and a model of the detector."""

from collections.abc import Mapping, Sequence
from math import inf
from random import Random
from statistics import median_low
from typing import Any, NamedTuple

import torch.distributed as dist

from distlab.grade import WrongResult
from judging.calls import typed
from judging.expect import floats
from judging.tensors import given_group
from phase4_production.given import StepTimes

Work = tuple[float, float]  # data and compute of a rank in a step
Verdict = list[tuple[int, str, float]]  # rank, part, ratio
# Exact in float64, so that ties are ties; the last one is not in float32.
TIMES_S = (0.0, 0.25, 0.25, 0.25, 1.0, 1.0, 1.5, 8.0, 1.5 + 2.0**-24)


class Story(NamedTuple):
    """Work of the ranks, step by step, and the options of the detector."""

    steps: Sequence[Sequence[Work]]
    options: Mapping[str, float]


def draw(random: Random, num_ranks: int) -> Story:
    """Draw up to three windows, and some steps of a further one."""
    window = random.choice((1, 1, 2, 3, 4, 5))
    factor = random.choice((1.5, 1.5, 2.0))
    num_steps = random.randint(1, 3) * window + random.randrange(window)
    typical = [random.choice(TIMES_S) for _ in "dc"]
    steps = [[_draw_work(random, typical) for _ in range(num_ranks)] for _ in range(num_steps)]
    return Story(steps, {"window": window, "factor": factor})


def _draw_work(random: Random, typical: Sequence[float]) -> Work:
    data_s, compute_s = (s if random.random() < 0.6 else random.choice(TIMES_S) for s in typical)
    return data_s, compute_s


def expected(story: Story) -> list[Verdict]:
    """Return the right verdict after each step; a part that ties is written "data or compute"."""
    window = int(story.options.get("window", 50))
    ends = range(1, len(story.steps) + 1)
    factor = story.options.get("factor", 1.3)
    return [
        [] if end % window else _verdict(story.steps[end - window : end], factor) for end in ends
    ]


def _verdict(steps: Sequence[Sequence[Work]], factor: float) -> Verdict:
    by_rank = [
        _medians([(data_s + compute_s, data_s, compute_s) for data_s, compute_s in of_rank])
        for of_rank in zip(*steps, strict=True)
    ]
    typical_s, *typical_parts_s = _medians(by_rank)
    stragglers = []
    for rank, (work_s, *parts_s) in enumerate(by_rank):
        if work_s > factor * typical_s:
            data_s, compute_s = (s - t for s, t in zip(parts_s, typical_parts_s, strict=True))
            part = "data" if data_s > compute_s else "compute"
            part = part if data_s != compute_s else "data or compute"
            stragglers.append((rank, part, work_s / typical_s if typical_s else inf))
    return stragglers


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [median_low(column) for column in zip(*rows, strict=True)]


def watch(lesson: Any, stories: Sequence[Story], group: Any = None) -> list[list[Verdict]]:
    """Let a detector see each story; in a step, all ranks wait for the slowest."""
    rank = dist.get_rank(group)
    verdicts: list[list[Verdict]] = []
    for story in stories:
        detector = lesson.StragglerDetector(**story.options, **given_group(group))
        verdicts.append([])
        for works in story.steps:
            step_s = max(map(sum, works)) + 0.5
            waited_s = step_s - sum(works[rank]) - 0.25
            verdicts[-1].append(_taken(detector.add(StepTimes(step_s, *works[rank], waited_s))))
    return verdicts


def _taken(stragglers: Any) -> Verdict:
    for straggler in typed("add", stragglers, list):
        if type(straggler).__name__ != "Straggler":
            raise WrongResult(f"add should return a list of Straggler; {straggler!r:.60} is in it")
    return [(int(s.rank), str(s.part), *floats("add", [s.ratio])) for s in stragglers]  # type: ignore[misc]
