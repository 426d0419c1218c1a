"""Judges tasks 4.9 and 4.10: which entries travel, in how many bytes, and that the rest comes."""

from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted
from judging.checks import short, short_beside
from phase4 import reduced as b
from phase4.reduced import Case, How
from phase4.reduced_checks import (
    CASES,
    RING,
    STUCK,
    check_bytes,
    check_cases,
    check_in_group,
    check_nan_travels,
    check_reduced,
    check_training,
    reduced,
)

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
INDEX_BYTES = 4
FRACTION = 0.2
LEAST = 1.0
NUM_STEPS, NUM_PARAMETERS = 300, 12
TOP, RANDOM, THRESHOLD = How("top_k", FRACTION), How("random_k", FRACTION), How("threshold", LEAST)


def number_of(n: int, fraction: float) -> int:
    """How many of n entries travel."""
    return min(n, max(1, round(fraction * n)))


def _check_at_its_places(where: str, gradient: list[float], sent: list[float]) -> None:
    wrong = [i for i, x in enumerate(sent) if x not in (0, gradient[i])]
    check(
        not wrong,
        f"{where}: sent should be this rank's gradient at the places that travel, as it is, and 0 "
        f"elsewhere. Entry {(wrong or [0])[0]} of the gradient is "
        f"{short(gradient[wrong[0]] if wrong else 0)}, of sent "
        f"{short(sent[wrong[0]] if wrong else 0)}. Nothing is scaled or averaged there.",
    )


def _check_count(
    where: str, case: Case, gradient: list[float], sent: list[float], f: float
) -> None:
    k = number_of(case.n, f)
    wanted, found = min(k, sum(x != 0 for x in gradient)), sum(x != 0 for x in sent)
    check(
        found <= k and (found == wanted or case.kind == "zeros"),
        f"{where}: with the fraction {f} of {case.n}, {counted(k, 'entry', 'entries')} should "
        f"travel; sent has {found} that are not 0. k = round(fraction * n), but at least 1.",
    )


# 4.9 top_k


def _check_largest(
    where: str, case: Case, gradient: list[float], sent: list[float], fraction: float = FRACTION
) -> None:
    _check_at_its_places(where, gradient, sent)
    _check_count(where, case, gradient, sent, fraction)
    kept = [abs(x) for x in sent if x]
    left = [abs(x) for x, y in zip(gradient, sent, strict=True) if x != y]
    check(
        not kept or max(left, default=0.0) <= min(kept),
        f"{where}: sent holds {short([x for x in sent if x])}, but of the gradient "
        f"{max(left, default=0.0):.4g} (without its sign) was left behind. Each rank sends its own "
        "entries of largest magnitude: the largest of |x|, not of x, and not those of rank 0.",
    )


@task("4.9", real=True)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_top_k_averages_the_largest_of_each_rank(grade: Grade, num_ranks: int) -> None:
    check_cases(grade, TOP, CASES, num_ranks, _check_largest)


@task("4.9")
@pytest.mark.parametrize("num_ranks", [5, 8])
def test_top_k_on_more_ranks(grade: Grade, num_ranks: int) -> None:
    check_cases(grade, TOP, CASES, num_ranks, _check_largest)


@task("4.9")
@pytest.mark.parametrize("fraction", [1e-9, 0.29, 0.3, 1.0])
def test_top_k_of_other_fractions(grade: Grade, fraction: float) -> None:
    def check_sent(where: str, case: Case, gradient: list[float], sent: list[float]) -> None:
        _check_largest(where, case, gradient, sent, fraction)

    cases = [Case(100), Case(3), Case(1), Case(0)]
    check_cases(grade, How("top_k", fraction), cases, 2, check_sent)


@task("4.9")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
def test_top_k_sends_values_and_short_indices(grade: Grade, num_ranks: int, dtype: str) -> None:
    n = grade.random.randrange(400, 600)
    k = number_of(n, FRACTION)
    args = (TOP, [Case(n, dtype)])
    run = grade.run(b.reduce_all, num_ranks, *args, options=RING, if_stuck=STUCK)
    each = ITEM_BYTES[dtype] + INDEX_BYTES
    check_bytes(
        *(run, each * k * (num_ranks - 1)),
        f"{k} values of {ITEM_BYTES[dtype]} bytes and {k} indices of {INDEX_BYTES} to each other "
        "rank. topk returns indices of 8 bytes: .int() makes them shorter. A tensor full of zeros "
        "costs as much as a dense one.",
    )


@task("4.9")
def test_top_k_lets_a_nan_travel(grade: Grade) -> None:
    run = grade.run(b.reduce_all, 3, TOP, [Case(20, kind="nan")], if_stuck=STUCK)
    check_nan_travels(run.results, TOP, 20)


@task("4.9")
def test_top_k_inside_a_group(grade: Grade) -> None:
    check_in_group(grade, TOP, CASES, _check_largest)


@task("4.9")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_feedback_adds_what_was_not_sent(grade: Grade, dtype: str) -> None:
    for n in (7, 1, 0):
        for number, step in enumerate(grade.call(b.feed, n, dtype, 3)):
            _check_step(f"step {number}, {n} entries, {dtype}", step)


def _check_step(where: str, step: dict[str, Any]) -> None:
    gradient, before, sent = step["gradient"], step["before"], step["sent"]
    wanted = [a + c for a, c in zip(gradient, before, strict=True)]
    left = [a - c for a, c in zip(wanted, sent, strict=True)]
    calls = len(step["wanted"])
    check(calls == 1, f"{where}: reduce should be called once; it was called {calls} times.")
    check(
        step["wanted"][0] == wanted,
        f"{where}: with the gradient {short(gradient)} and the residual {short(before)}, reduce "
        f"should get {short(wanted)}; it got {short(step['wanted'][0])}.",
    )
    check(
        step["returned"] == step["mean"],
        f"{where}: the mean is {short(step['mean'])}; returned was {short(step['returned'])}. "
        "Return the mean that reduce has returned, as it is.",
    )
    check(
        step["after"] == left,
        f"{where}: of {short(wanted)}, {short(sent)} was sent, so that the residual should be "
        f"{short(left)} afterwards; it is {short(step['after'])}. It is written in place, and what "
        "counts is what this rank has sent, not the mean. Fewer bits make it another number.",
    )
    check(not step["changed"], f"{where}: the gradient was changed. It is the caller's.")


@task("4.9")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_top_k_trains_with_feedback(grade: Grade, num_ranks: int) -> None:
    how = How("top_k", 1 / NUM_PARAMETERS)
    args = (how, NUM_PARAMETERS, NUM_STEPS, "lesson")
    run = grade.run(b.train, num_ranks, *args, if_stuck=STUCK)
    what = f"{NUM_STEPS} steps, with one entry per step and rank"
    check_training(run, NUM_PARAMETERS, TRAINED["top_k"], what)


TRAINED = {"top_k": 0.6, "random_k": 0.1, "threshold": 0.3}


# 4.10 random_k


def _check_drawn(where: str, case: Case, gradient: list[float], sent: list[float]) -> None:
    _check_at_its_places(where, gradient, sent)
    _check_count(where, case, gradient, sent, FRACTION)


@task("4.10", real=True)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_random_k_averages_the_same_places(grade: Grade, num_ranks: int) -> None:
    cases, by_rank = reduced(grade, RANDOM, CASES, num_ranks)
    _check_same_places(by_rank)
    check_reduced(by_rank, RANDOM, cases, _check_drawn)


@task("4.10")
@pytest.mark.parametrize("num_ranks", [5, 8])
def test_random_k_on_more_ranks(grade: Grade, num_ranks: int) -> None:
    cases, by_rank = reduced(grade, RANDOM, CASES, num_ranks)
    _check_same_places(by_rank)
    check_reduced(by_rank, RANDOM, cases, _check_drawn)


def _check_same_places(by_rank: list[Any]) -> None:
    for rank, cases in enumerate(by_rank):
        for case, found, first in zip(CASES, cases, by_rank[0], strict=True):
            mine, others = ([i for i, x in enumerate(c["sent"]) if x] for c in (found, first))
            check(
                mine == others,
                f"random_k of {case.n} entries: rank {rank} sent those at {short(mine)}, rank 0 "
                f"those at {short(others)}. All ranks draw from generators in one state: draw from "
                "nothing else, and nothing that depends on the values.",
            )


@task("4.10")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
def test_random_k_sends_no_indices(grade: Grade, num_ranks: int, dtype: str) -> None:
    n = grade.random.randrange(1500, 2500)
    k, item = number_of(n, FRACTION), ITEM_BYTES[dtype]
    args = (RANDOM, [Case(n, dtype)])
    run = grade.run(b.reduce_all, num_ranks, *args, options=RING, if_stuck=STUCK)
    most = 2 * item * k * (num_ranks - 1) / num_ranks
    check_bytes(run, most, f"those of an all-reduce of {k} values of {item} bytes, without places.")


@task("4.10")
def test_random_k_draws_other_places_each_time(grade: Grade) -> None:
    n, calls, k = 12, 400, 3
    by_rank = grade.run(b.draw_often, 2, n, k / n, calls, if_stuck=STUCK).results
    for rank, found in enumerate(by_rank):
        counts = [sum(place in one for one in found["places"]) for place in range(n)]
        check(
            found["places"] == by_rank[0]["places"],
            f"rank {rank} does not draw the places of rank 0. Draw from generator alone.",
        )
        check(
            min(counts) >= 55 and max(counts) <= 145,  # 5 standard deviations from 100
            f"random_k was called {calls} times, each time for {k} of {n} places; the places came "
            f"up {counts} times. All should come up equally often, about {calls * k // n} times, "
            "and others in each call.",
        )
        kinds = len({tuple(one) for one in found["places"]})
        check(
            kinds >= 120,
            f"{calls} calls of random_k have drawn {kinds} different sets of {k} of {n} places, "
            f"such as {found['places'][:3]}. Of the 220 sets all are equally likely, so that "
            "about 184 should have come up: draw each place for itself.",
        )
        check(
            found["is_drawn_from"] and found["state"] == by_rank[0]["state"],
            f"rank {rank}: the generator should be drawn from, equally often on all ranks.",
        )


@task("4.10")
def test_random_k_inside_a_group(grade: Grade) -> None:
    check_in_group(grade, RANDOM, CASES, _check_drawn)


@task("4.10")
@pytest.mark.parametrize(("name", "num_ranks"), [("random_k", 4), ("threshold", 2)])
def test_these_train_with_feedback(grade: Grade, name: str, num_ranks: int) -> None:
    how = How(name, {"random_k": 0.25, "threshold": 4.0}[name])
    run = grade.run(b.train, num_ranks, how, NUM_PARAMETERS, NUM_STEPS, "own", if_stuck=STUCK)
    what = f"{NUM_STEPS} steps with {name}"
    check_training(run, NUM_PARAMETERS, TRAINED[name], what)


# 4.10 threshold


UNEVEN = [Case(n, kind="uneven", seed=n) for n in (0, 1, 2, 7, 41)]
OTHERS = [Case(41, dtype, "uneven", seed=2) for dtype in ("float64", "bfloat16")]
PASSING = [*UNEVEN, *OTHERS, *CASES]


def _check_large(where: str, case: Case, gradient: list[float], sent: list[float]) -> None:
    wanted = [x if abs(x) >= LEAST else 0.0 for x in gradient]
    check(
        sent == wanted,
        f"{where}: with least {LEAST}, the entries to be sent are "
        f"{short([x for x in wanted if x])}, those with |x| ≥ least; sent holds "
        f"{short_beside(sent, wanted)}, where {short_beside(wanted, sent)} is right.",
    )


@task("4.10", real=True)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_threshold_averages_what_is_large(grade: Grade, num_ranks: int) -> None:
    check_cases(grade, THRESHOLD, PASSING, num_ranks, _check_large)


@task("4.10")
@pytest.mark.parametrize("num_ranks", [5, 8])
def test_threshold_on_more_ranks(grade: Grade, num_ranks: int) -> None:
    check_cases(grade, THRESHOLD, PASSING, num_ranks, _check_large)


@task("4.10")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
def test_threshold_sends_what_the_fullest_rank_has(
    grade: Grade, num_ranks: int, dtype: str
) -> None:
    n = grade.random.randrange(200, 300)
    args = (THRESHOLD, [Case(n, dtype, "uneven")])
    run = grade.run(b.reduce_all, num_ranks, *args, options=RING, if_stuck=STUCK)
    most, item = 3 * (num_ranks - 1), ITEM_BYTES[dtype]
    check_bytes(
        *(run, most * (item + INDEX_BYTES) * (num_ranks - 1)),
        f"{most} values of {item} bytes and {most} indices of {INDEX_BYTES} to each other rank, "
        "and a little for the numbers of entries.",
    )


@task("4.10")
def test_threshold_lets_a_nan_travel(grade: Grade) -> None:
    run = grade.run(b.reduce_all, 3, THRESHOLD, [Case(20, kind="nan")], if_stuck=STUCK)
    check_nan_travels(run.results, THRESHOLD, 20)


@task("4.10")
def test_threshold_inside_a_group(grade: Grade) -> None:
    check_in_group(grade, THRESHOLD, PASSING, _check_large)
