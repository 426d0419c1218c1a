"""Judges tasks 4.9 and 4.10: which entries travel, in how many bytes, and that the rest comes."""

from functools import partial

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted
from judging.checks import short
from judging.expect import expect
from phase4 import compressors as b
from phase4.compressor_contract import CASES, STUCK, Compressor
from phase4.compressors import Case, How

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
INDEX_BYTES = 4
FRACTION, LEAST = 0.2, 1.0
Numbers = list[float]


def number_of(n: int, fraction: float = FRACTION) -> int:
    """Return the number of entries that travel."""
    return min(n, max(1, round(fraction * n)))


def _check_drawn(
    where: str, case: Case, gradient: Numbers, sent: Numbers, fraction: float = FRACTION
) -> None:
    """Check that what was sent is the gradient at as many places as should travel."""
    wrong = [i for i, x in enumerate(sent) if x not in (0, gradient[i])]
    first = wrong[0] if wrong else -1
    check(
        not wrong,
        f"{where}: sent should be this rank's gradient at the places that travel, as it is, and 0 "
        f"elsewhere. Entry {first} of the gradient is {short(gradient[first:][:1])}, of sent "
        f"{short(sent[first:][:1])}. Nothing is scaled or averaged there.",
    )
    k = number_of(case.n, fraction)
    right, count = min(k, sum(x != 0 for x in gradient)), sum(x != 0 for x in sent)
    check(
        count <= k and (count == right or case.kind == "zeros"),
        f"{where}: with the fraction {fraction} of {case.n}, {counted(k, 'entry', 'entries')} "
        f"should travel; sent has {count} that are not 0. k = round(fraction * n), but at least 1.",
    )


def _check_largest(
    where: str, case: Case, gradient: Numbers, sent: Numbers, fraction: float = FRACTION
) -> None:
    _check_drawn(where, case, gradient, sent, fraction)
    kept = [abs(x) for x in sent if x]
    left = max((abs(x) for x, y in zip(gradient, sent, strict=True) if x != y), default=0.0)
    check(
        not kept or left <= min(kept),
        f"{where}: sent holds {short([x for x in sent if x])}, but {left:.4g} (without its sign) "
        "of the gradient does not travel. Each rank sends its own entries of largest magnitude: "
        "the largest of |x|, not of x, and not those of rank 0.",
    )


def _check_large(where: str, case: Case, gradient: Numbers, sent: Numbers) -> None:
    right = [x if abs(x) >= LEAST else 0.0 for x in gradient]
    expect(f"{where}, least {LEAST}: sent", sent, right, "The entries with |x| ≥ least travel.")


UNEVEN = [
    *(Case(n, kind="uneven", seed=n) for n in (0, 1, 2, 7, 41)),
    *(Case(41, dtype, "uneven", seed=2) for dtype in ("float64", "bfloat16")),
]
TOP = Compressor(How("top_k", FRACTION), _check_largest)
RANDOM = Compressor(
    How("random_k", FRACTION),
    _check_drawn,
    if_apart="All ranks draw the same places, from generators in one state: draw from nothing "
    "else, and nothing that depends on the values.",
)
THRESHOLD = Compressor(How("threshold", LEAST), _check_large, [*UNEVEN, *CASES])
WORLDS = pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


# 4.9 top_k and reduce_with_feedback


@task("4.9", real=True)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_top_k_averages_the_largest_of_each_rank(grade: Grade, num_ranks: int) -> None:
    TOP.check(grade, num_ranks)


@task("4.9")
@pytest.mark.parametrize("num_ranks", [5, 8])
def test_top_k_on_more_ranks(grade: Grade, num_ranks: int) -> None:
    TOP.check(grade, num_ranks)


@task("4.9")
@pytest.mark.parametrize("fraction", [1e-9, 0.29, 0.3, 1.0])
def test_top_k_of_other_fractions(grade: Grade, fraction: float) -> None:
    check_sent = partial(_check_largest, fraction=fraction)
    cases = [Case(n) for n in (100, 3, 1, 0)]
    Compressor(How("top_k", fraction), check_sent, cases).check(grade, 2)


@task("4.9")
@DTYPES
@WORLDS
def test_top_k_sends_values_and_short_indices(grade: Grade, num_ranks: int, dtype: str) -> None:
    n = grade.random.randrange(400, 600)
    k, item = number_of(n), ITEM_BYTES[dtype]
    TOP.check_bytes(
        *(grade, num_ranks, Case(n, dtype), (item + INDEX_BYTES) * k * (num_ranks - 1)),
        f"{k} values of {item} bytes and {k} indices of {INDEX_BYTES} to each other rank. topk "
        "returns indices of 8 bytes: .int() makes them shorter. A tensor full of zeros costs as "
        "much as a dense one.",
    )


@task("4.9")
def test_top_k_of_odd_gradients(grade: Grade) -> None:
    TOP.check_nan(grade)
    Compressor(How("top_k", 1e-9), _check_largest).check_far_places(grade)


@task("4.9")
def test_top_k_inside_a_group(grade: Grade) -> None:
    TOP.check_in_group(grade)


@task("4.9")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_top_k_trains_with_feedback(grade: Grade, num_ranks: int) -> None:
    Compressor(How("top_k", 1 / 12), _check_largest).check_training(grade, num_ranks, 0.6, "lesson")


@task("4.9")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_feedback_adds_what_was_not_sent(grade: Grade, dtype: str) -> None:
    for n in (7, 1, 0):
        for number, step in enumerate(grade.call(b.feed, n, dtype, 3)):
            where = f"step {number}, {n} entries, {dtype}"
            wanted = [a + c for a, c in zip(step["gradient"], step["before"], strict=True)]
            left = [a - c for a, c in zip(wanted, step["sent"], strict=True)]
            expect(f"{where}: the number of calls of reduce", len(step["calls"]), 1)
            expect(
                f"{where}, with the gradient {short(step['gradient'])} and the residual "
                f"{short(step['before'])}: the argument of reduce",
                *(step["calls"][0], wanted),
            )
            cause = "Return the mean that reduce has returned, as it is."
            expect(f"{where}: the result", step["returned"], step["mean"], cause)
            expect(
                f"{where}: after {short(step['sent'])} of {short(wanted)} was sent, the residual",
                *(step["after"], left),
                "It is written in place, and what counts is what this rank has sent, not the mean. "
                "Fewer bits make it another number.",
            )
            check(not step["changed"], f"{where}: the gradient was changed. It is the caller's.")


# 4.10 random_k


@task("4.10", real=True)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_random_k_averages_the_same_places(grade: Grade, num_ranks: int) -> None:
    RANDOM.check(grade, num_ranks)


@task("4.10")
@pytest.mark.parametrize("num_ranks", [5, 8])
def test_random_k_on_more_ranks(grade: Grade, num_ranks: int) -> None:
    RANDOM.check(grade, num_ranks)


@task("4.10")
@DTYPES
@WORLDS
def test_random_k_sends_no_indices(grade: Grade, num_ranks: int, dtype: str) -> None:
    n = grade.random.randrange(1500, 2500)
    k, item = number_of(n), ITEM_BYTES[dtype]
    most = 2 * item * k * (num_ranks - 1) / num_ranks
    what = f"those of an all-reduce of {k} values of {item} bytes, without places."
    RANDOM.check_bytes(grade, num_ranks, Case(n, dtype), most, what)


@task("4.10")
def test_random_k_draws_other_places_each_time(grade: Grade) -> None:
    n, calls, k = 12, 400, 3
    by_rank = grade.run(b.draw_often, 2, n, k / n, calls, if_stuck=STUCK).results
    for rank, found in enumerate(by_rank):
        counts = [sum(place in places for places in found["places"]) for place in range(n)]
        check(
            found["places"] == by_rank[0]["places"],
            f"rank {rank} does not draw the places of rank 0. Draw from generator alone, and "
            "nothing that depends on the values.",
        )
        check(
            min(counts) >= 55 and max(counts) <= 145,  # 5 standard deviations from 100
            f"random_k was called {calls} times, each time for {k} of {n} places; the places came "
            f"up {counts} times. All should come up equally often, about {calls * k // n} times, "
            "and others in each call.",
        )
        kinds = len({tuple(places) for places in found["places"]})
        check(
            kinds >= 120,
            f"{calls} calls of random_k have drawn {kinds} different sets of {k} of {n} places, "
            f"such as {found['places'][:3]}. Of the 220 sets all are equally likely, so that "
            "about 184 should have come up: draw each place for itself.",
        )
        check(
            found["is drawn from"] and found["state"] == by_rank[0]["state"],
            f"rank {rank}: the generator should be drawn from, equally often on all ranks.",
        )


@task("4.10")
def test_random_k_inside_a_group(grade: Grade) -> None:
    RANDOM.check_in_group(grade)


# 4.10 threshold


@task("4.10", real=True)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_threshold_averages_what_is_large(grade: Grade, num_ranks: int) -> None:
    THRESHOLD.check(grade, num_ranks)


@task("4.10")
@pytest.mark.parametrize("num_ranks", [5, 8])
def test_threshold_on_more_ranks(grade: Grade, num_ranks: int) -> None:
    THRESHOLD.check(grade, num_ranks)


@task("4.10")
@DTYPES
@WORLDS
def test_threshold_sends_what_the_fullest_rank_has(
    grade: Grade, num_ranks: int, dtype: str
) -> None:
    n, most, item = grade.random.randrange(200, 300), 3 * (num_ranks - 1), ITEM_BYTES[dtype]
    THRESHOLD.check_bytes(
        *(grade, num_ranks, Case(n, dtype, "uneven")),
        most * (item + INDEX_BYTES) * (num_ranks - 1),
        f"{most} values of {item} bytes and {most} indices of {INDEX_BYTES} to each other rank, "
        "and a little for the numbers of entries.",
    )


@task("4.10")
def test_threshold_of_odd_gradients(grade: Grade) -> None:
    THRESHOLD.check_nan(grade)
    THRESHOLD.check_far_places(grade)


@task("4.10")
def test_threshold_inside_a_group(grade: Grade) -> None:
    THRESHOLD.check_in_group(grade)


@task("4.10")
def test_these_train_with_feedback(grade: Grade) -> None:
    Compressor(How("random_k", 0.25), _check_drawn).check_training(grade, 4, 0.1)
    Compressor(How("threshold", 4.0), _check_large).check_training(grade, 2, 0.3)
