"""Judges tasks 4.9 and 4.10: the entries that travel, their bytes, and feedback of the rest."""

from collections.abc import Sequence

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted
from judging.checks import short
from judging.expect import expect
from phase4 import compressors as b
from phase4.compressor_contract import CASES, STUCK, Compressor, Numbers
from phase4.compressors import Case

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
INDEX_BYTES = 4
FRACTION, LEAST, RARE = 0.2, 1.0, 1e-9


def number_of(n: int, fraction: float) -> int:
    """Return the number of entries that travel."""
    return min(n, max(1, round(fraction * n)))


def _check_drawn(
    where: str, fraction: float, case: Case, gradients: Sequence[Numbers], rank: int, sent: Numbers
) -> None:
    """Check that what was sent is the gradient at as many places as should travel."""
    gradient = gradients[rank]
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
    where: str, fraction: float, case: Case, gradients: Sequence[Numbers], rank: int, sent: Numbers
) -> None:
    _check_drawn(where, fraction, case, gradients, rank, sent)
    kept = [abs(x) for x in sent if x]
    left = max((abs(x) for x, y in zip(gradients[rank], sent, strict=True) if x != y), default=0.0)
    check(
        not kept or left <= min(kept),
        f"{where}: sent holds {short([x for x in sent if x])}, but {left:.4g} (without its sign) "
        "of the gradient does not travel. Each rank sends its own entries of largest magnitude: "
        "the largest of |x|, not of x, and not those of rank 0.",
    )


def _check_large(
    where: str, least: float, case: Case, gradients: Sequence[Numbers], rank: int, sent: Numbers
) -> None:
    right = [x if abs(x) >= least else 0.0 for x in gradients[rank]]
    expect(f"{where}, least {least}: sent", sent, right, "The entries with |x| ≥ least travel.")


def _bytes_with_places(n: int, fraction: float, case: Case) -> tuple[float, str]:
    k, item = number_of(case.n, fraction), ITEM_BYTES[case.dtype]
    return (item + INDEX_BYTES) * k * (n - 1), (
        f"{k} values of {item} bytes and {k} indices of {INDEX_BYTES} to each other rank. topk "
        "returns indices of 8 bytes: .int() makes them shorter. A tensor full of zeros costs as "
        "much as a dense one."
    )


def _bytes_of_values(n: int, fraction: float, case: Case) -> tuple[float, str]:
    k, item = number_of(case.n, fraction), ITEM_BYTES[case.dtype]
    what = f"those of an all-reduce of {k} values of {item} bytes, without places."
    return 2 * item * k * (n - 1) / n, what


def _bytes_of_the_fullest(n: int, least: float, case: Case) -> tuple[float, str]:
    most, item = 3 * (n - 1), ITEM_BYTES[case.dtype]
    return most * (item + INDEX_BYTES) * (n - 1), (
        f"{most} values of {item} bytes and {most} indices of {INDEX_BYTES} to each other rank, "
        "and a little for the numbers of entries."
    )


TOP = Compressor(
    "4.9",
    "top_k",
    worlds=[(1, 1.0), (2, FRACTION), (5, RARE), (3, 0.29)],
    check_sent=_check_largest,
    costs=[(2, FRACTION, Case(431, "bfloat16")), (5, FRACTION, Case(563))],
    most_bytes=_bytes_with_places,
    far=RARE,
)
RANDOM = Compressor(
    "4.10",
    "random_k",
    worlds=[(1, FRACTION), (2, RARE), (5, FRACTION), (3, 0.29)],
    check_sent=_check_drawn,
    costs=[(2, FRACTION, Case(2431, "bfloat16")), (5, FRACTION, Case(1563))],
    most_bytes=_bytes_of_values,
    if_apart="All ranks draw the same places, from generators in one state: draw from nothing "
    "else, and nothing that depends on the values.",
)
THRESHOLD = Compressor(
    "4.10",
    "threshold",
    worlds=[(1, LEAST), (5, LEAST), (2, LEAST)],
    check_sent=_check_large,
    costs=[(2, LEAST, Case(231, "bfloat16", "uneven")), (5, LEAST, Case(263, kind="uneven"))],
    most_bytes=_bytes_of_the_fullest,
    cases=[
        *(Case(n, kind="uneven", seed=n) for n in (0, 1, 2, 41)),
        *(Case(41, dtype, "uneven", seed=2) for dtype in ("float64", "bfloat16")),
        *CASES,
    ],
    far=LEAST,
)
for compressor in (TOP, RANDOM, THRESHOLD):
    globals().update(compressor.tests())


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


@task("4.10")
def test_random_k_draws_other_places_each_time(grade: Grade) -> None:
    n, calls, k = 12, 400, 3
    by_rank = grade.run(b.draw_often, 2, n, k / n, calls, if_stuck=STUCK).results
    for rank, facts in enumerate(by_rank):
        counts = [sum(place in places for places in facts["places"]) for place in range(n)]
        check(
            facts["places"] == by_rank[0]["places"],
            f"rank {rank} does not draw the places of rank 0. Draw from generator alone, and "
            "nothing that depends on the values.",
        )
        check(
            min(counts) >= 55 and max(counts) <= 145,  # 5 standard deviations from 100
            f"random_k was called {calls} times, each time for {k} of {n} places; the places came "
            f"up {counts} times. All should come up equally often, about {calls * k // n} times, "
            "and others in each call.",
        )
        kinds = len({tuple(places) for places in facts["places"]})
        check(
            kinds >= 120,
            f"{calls} calls of random_k have drawn {kinds} different sets of {k} of {n} places, "
            f"such as {facts['places'][:3]}. Of the 220 sets all are equally likely, so that "
            "about 184 should have come up: draw each place for itself.",
        )
        check(
            facts["is drawn from"] and facts["state"] == by_rank[0]["state"],
            f"rank {rank}: the generator should be drawn from, equally often on all ranks.",
        )
