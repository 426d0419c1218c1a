"""Judges task 2.8: every layer is in one stage, and the most expensive one costs least."""

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from random import Random

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted
from judging.checks import check_refused, short, short_beside
from phase2 import stages as b

Costs = Sequence[float]
FIXED: list[tuple[list[float], int]] = [
    ([3, 1, 1, 1, 3], 3),
    ([3, 3, 2, 6, 1, 4], 3),
    ([1, 1, 1, 1, 1], 4),  # filled up to twice the mean, one stage is left empty
    ([9, 4, 4, 4, 4, 4, 4, 9], 4),  # embedding and head cost more than a layer
    ([1, 1, 1, 1, 1, 1, 1, 10], 2),
    ([10, 1, 1, 1, 1, 1, 1, 1], 2),
    ([7, 7, 4, 9, 1, 5], 3),  # stages of 7, 11 and 15 have the smallest sum of squares
]
FREE: list[tuple[list[float], int]] = [([0, 0, 5, 0, 0], 4), ([0, 0, 0], 2), ([7, 0, 0, 0], 3)]
UNITS = (1, 1e-7)  # of costs, which may be seconds
FACTOR = 1 + 1e-9  # of rounding


@task("2.8")
def test_every_layer_is_in_one_stage(grade: Grade) -> None:
    sizes = [(layers, p) for layers in range(1, 10) for p in range(1, layers + 1)]
    cases = [([grade.random.randint(1, 9) for _ in range(n)], p) for n, p in sizes]
    cases = [*cases, *FREE]  # type: ignore[list-item]
    for (costs, p), cut in zip(cases, grade.call(b.cuts_of, cases), strict=True):
        _check_parts(costs, p, cut)


def _check_parts(costs: Costs, p: int, cut: b.Cut) -> None:
    yours = short([range(*stage) for stage in cut])
    here = f"costs {short(costs)} in {counted(p, 'stage')}: yours are {yours}"
    check(
        len(cut) == p,
        f"{here}. They are {counted(len(cut), 'stage')}; they should be {p}.",
    )
    empty = next((stage for stage, (start, stop) in enumerate(cut) if start >= stop), None)
    check(
        empty is None,
        f"{here}. Stage {empty} has no layer: its rank would have nothing to do. Keep a layer "
        "for every stage, even if layers cost nothing.",
    )
    ends = [0, *(stop for _, stop in cut)]
    starts = [*(start for start, _ in cut), len(costs)]
    check(
        ends == starts,
        f"{here}. The first should start with layer 0, each of the others where the one before it "
        f"stops, and the last stop at {len(costs)}: the stop of a range is not in it.",
    )


@task("2.8")
def test_the_most_expensive_stage_costs_least(grade: Grade) -> None:
    cases = [*FIXED, *FREE, *(_drawn(grade.random) for _ in range(60))]
    for (costs, p), cut in zip(cases, grade.call(b.cuts_of, cases), strict=True):
        _check_parts(costs, p, cut)
        _check_largest(costs, p, cut)


def _drawn(random: Random) -> tuple[list[float], int]:
    num_layers = random.randint(3, 12)
    draw = random.choice([lambda: random.randint(1, 20), lambda: 10 * random.random() ** 4])
    unit = random.choice(UNITS)
    return [draw() * unit for _ in range(num_layers)], random.randint(2, num_layers)


def _check_largest(costs: Costs, p: int, cut: b.Cut) -> None:
    found = [sum(costs[start:stop]) for start, stop in cut]
    least = _least_largest(costs, p)
    check(
        max(found) <= least * FACTOR,
        f"costs {short_beside(costs, found)} in {counted(p, 'stage')}: yours cost "
        f"{short_beside(found, costs)}, and the most expensive {max(found):g}; in the best "
        f"cut it costs {least:g}. Equal numbers of layers are not equal costs, and a stage that is "
        "filled up to the mean, before the rest is looked at, may leave too much for the others.",
    )


def _least_largest(costs: Costs, p: int) -> float:
    """The cost of the most expensive stage in the best cut."""
    before = [0, *accumulate(costs)]
    best = [0.0, *[inf] * len(costs)]  # of the layers before i
    for _ in range(p):
        best = [
            min((max(best[i], before[end] - before[i]) for i in range(end)), default=inf)
            for end in range(len(before))
        ]
    return best[-1]


@task("2.8")
@pytest.mark.parametrize("num_layers", [96, 200])
def test_a_deep_model_is_cut_at_once(grade: Grade, num_layers: int) -> None:
    costs: list[float] = [grade.random.randint(1, 99) for _ in range(num_layers)]
    run = grade.run(
        *(b.cuts_of, 1, [(costs, 16)]),
        if_slow=f"{num_layers} layers in 16 stages should take about L²·16 steps. Trying every cut "
        "takes forever: there are more than 10^18. Work out each part of the model only once.",
    )
    _check_parts(costs, 16, run.results[0][0])
    _check_largest(costs, 16, run.results[0][0])


@task("2.8")
@pytest.mark.parametrize(("num_layers", "num_stages"), [(6, 7), (0, 1), (12, 96), (3, 0), (5, -2)])
def test_impossible_numbers_are_refused(grade: Grade, num_layers: int, num_stages: int) -> None:
    refused = grade.call(b.refusal_of_cut, num_layers, num_stages)
    what = f"to cut {counted(num_layers, 'layer')} into {counted(num_stages, 'stage')}"
    check_refused([refused], what, str(num_layers), str(num_stages))


@task("2.8")
def test_the_costs_are_not_changed(grade: Grade) -> None:
    costs = [float(grade.random.randint(1, 9)) for _ in range(7)]
    after = grade.call(b.costs_after, [*costs], 3)
    check(after == costs, f"costs were {costs}, and are {after} afterwards: they are the caller's.")
