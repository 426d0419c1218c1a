"""Judges tasks 4.9 to 4.11: gradient compressors, codes, and error feedback."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil, isfinite
from random import Random
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted
from judging.checks import short, short_beside
from judging.expect import expect
from phase4 import compressors as b
from phase4.compressor_contract import CASES, NOT_SCALED, STUCK, Compressor, Numbers, factor_of
from phase4.compressors import Case

# Tasks 4.9 and 4.10: the entries that are sent, and error feedback for those that are not

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
INDEX_BYTES = 4
FRACTION, LEAST, RARE = 0.2, 1.0, 1e-9


def number_of(n: int, fraction: float) -> int:
    """Return the number of entries to send."""
    return min(n, max(1, round(fraction * n)))


def _check_drawn(
    where: str, fraction: float, case: Case, gradients: Sequence[Numbers], rank: int, sent: Numbers
) -> None:
    """Check that the required number of entries was sent, each as it is in the gradient."""
    gradient = gradients[rank]
    wrong = [i for i, x in enumerate(sent) if x not in (0, gradient[i])]
    first = wrong[0] if wrong else -1
    factor = factor_of(sent, [x if y else 0.0 for x, y in zip(gradient, sent, strict=True)])
    scaled = f"All that is sent is {factor:.4g} times as large. {NOT_SCALED}" if factor else ""
    check(
        not wrong,
        f"{where}: sent should be this rank's gradient at the places that travel, as it is, and 0 "
        f"elsewhere. Entry {first} of the gradient is {short(gradient[first:][:1])}, of sent "
        f"{short(sent[first:][:1])}. {scaled or 'Nothing is scaled or averaged there.'}",
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
            min(counts) >= 55 and max(counts) <= 145,  # within 5 standard deviations of 100
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


# Task 4.11: codes, their decoding, and an exchange of few bytes that loses nothing

DTYPES = ["float32", "float64", "bfloat16"]
# Tolerances for a scale, which may be computed in 16 bits.
SCALE_SLACK = {"float32": 1e-5, "float64": 1e-5, "bfloat16": 1e-2}
TIE = 1e-4  # rounding error, in steps, within which a tie may go either way


# The codecs


def _code(
    grade: Grade, name: str, rows: list[Numbers], dtype: str = "float32"
) -> list[tuple[str, Numbers, dict[str, Any]]]:
    """Encode and decode rows of numbers; check dtypes, shapes, and that extra bytes change nothing.

    Returns:
        For each row, a description, the row itself and the results.
    """
    coded = []
    for x, facts in zip(rows, grade.call(b.code, name, rows, dtype), strict=True):
        where = f"{name} of {short(x)}, {dtype}"
        num_bytes = len(x) if name == "Int8" else ceil(len(x) / 8)
        right = {"codes": ["uint8", [num_bytes]], "scale": ["float32", []]}
        for what, kind in (right | {"decoded numbers": ["float32", [len(x)]]}).items():
            expect(f"{where}: dtype and shape of the {what}", facts["kinds"][what], kind)
        check(not facts["changed"], f"{where}: encode has changed x, which is the caller's.")
        check(
            str(facts["longer"]) == str(facts["decoded"]),
            f"{where}: with more bytes after the codes, other numbers come out: "
            f"{short_beside(facts['longer'], facts['decoded'])}, not "
            f"{short_beside(facts['decoded'], facts['longer'])}. Decode the first n codes.",
        )
        coded.append((f"{name} of {len(x)} numbers, {dtype}", x, facts))
    return coded


def _numbers(grade: Grade, n: int, dtype: str) -> Numbers:
    case = Case(n, dtype, seed=grade.random.randrange(10**6))
    numbers: Numbers = b.gradient_of(case, 0, 1).double().tolist()
    return numbers


@task("4.11")
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_rounds_to_the_nearest_step(grade: Grade, dtype: str) -> None:
    sizes = ((1, 1.0), (6, 1.0), (101, 1.0), (101, 1e-30), (101, 1e30))
    rows = [[factor * x for x in _numbers(grade, n, dtype)] for n, factor in sizes]
    for where, x, facts in _code(grade, "Int8", rows, dtype):
        scale, right = facts["scale"], max(map(abs, x)) / 127
        slack = SCALE_SLACK[dtype]
        expect(f"{where}: the scale, max|x| / 127,", scale, right, "", slack * right)
        for number, got in zip(x, facts["decoded"], strict=True):
            steps = got / scale
            check(
                abs(got - number) <= scale * (0.5 + 128 * slack) and abs(steps) < 127.01,
                f"{where}: {number:.6g} comes out as {got:.6g}, {abs(got - number) / scale:.3g} "
                f"steps away; {scale:.6g} is a step, and half a step is the most. Round to the "
                "nearest step, do not cut off, and keep the sign.",
            )
            check(
                abs(steps - round(steps)) < 1e-3,
                f"{where}: {got:.6g} is not a whole number of steps of {scale:.6g}.",
            )


@task("4.11")
def test_zeros_stay_zero_in_int8(grade: Grade) -> None:
    rows = [[0.0, 0.0, 0.0], [0.0, 3.0, 0.0, -5.0], []]
    for _, x, facts in _code(grade, "Int8", rows):
        zeros = [got for number, got in zip(x, facts["decoded"], strict=True) if number == 0]
        check(
            not any(zeros) and all(map(isfinite, facts["decoded"])),
            f"Int8 of {x}: zeros should stay 0, also where the scale is 0, and nothing may be "
            f"divided by that; what comes out is {facts['decoded']}.",
        )
        check(
            (facts["scale"] == 0) == (not any(x)),
            f"Int8 of {x}: the scale should be 0 where all is 0, and only there; it is "
            f"{facts['scale']}.",
        )


@task("4.11")
@pytest.mark.parametrize("dtype", DTYPES)
def test_sign_keeps_signs_and_the_mean_magnitude(grade: Grade, dtype: str) -> None:
    rows = [[0.0] * 9, *(_numbers(grade, n, dtype) for n in (0, 1, 8, 9, 101))]
    for x in rows[2:]:
        x[len(x) // 2] = 0.0
    for where, x, facts in _code(grade, "Sign", rows, dtype):
        scale = sum(map(abs, x)) / max(len(x), 1)
        slack = SCALE_SLACK[dtype] * scale
        expect(f"{where}: the scale, the mean of |x|,", facts["scale"], scale, "", slack)
        expect(
            f"{where}: the numbers that are decoded",
            *(facts["decoded"], [-scale if number < 0 else scale for number in x]),
            f"A 0, such as number {len(x) // 2}, counts as positive.",
            slack,
        )


@task("4.11")
@pytest.mark.parametrize("name", ["Int8", "Sign"])
def test_what_is_not_finite_is_seen(grade: Grade, name: str) -> None:
    rows = [
        [1.0, bad, -2.0, 0.5, -0.25, 3.0, 1.5, 2.5, -1.0]
        for bad in (float("nan"), float("inf"), -float("inf"))
    ]
    for _, (_, bad, *_), facts in _code(grade, name, rows):
        check(
            not any(map(isfinite, facts["decoded"])),
            f"{name} of numbers of which one is {bad}: no number that comes out should be finite, "
            f"so that it is seen everywhere; these come out: {short(facts['decoded'])}. The scale "
            "shows it if it is NaN or infinite.",
        )


# The exchange


def _check_sent(
    where: str, codec: str, case: Case, gradients: Sequence[Numbers], rank: int, sent: Numbers
) -> None:
    """Check what a rank sent, unless it depends on how bfloat16 or ties are rounded."""
    if codec == "Exact":
        expect(
            *(f"{where}, with a codec that loses nothing: sent", sent, gradients[rank]),
            "Call encode and decode of the codec that is given, chunk by chunk, and give decode "
            "the number of entries.",
            1e-5 if case.dtype != "bfloat16" else 0.1,
        )
    elif _is_compared(case):
        expect(
            *(f"{where}, {codec}: sent", sent, _exchanged(gradients, codec)[0][rank]),
            "Each rank encodes each chunk, the r-th of tensor_split for rank r, with a scale of "
            "its own; it has sent what its codes stand for. The owner averages what it decodes, "
            "and encodes the mean, again with its own scale. If this second rounding takes d from "
            "the mean of a chunk, its owner has sent N · d less, in its own chunk: what is lost "
            "otherwise never comes again.",
            1e-5
            * max((abs(x) for gradient in gradients for x in gradient), default=0.0)
            * len(gradients),
        )


def _is_compared(case: Case) -> bool:
    return case.kind in ("normal", "strided") and case.dtype != "bfloat16"


def _draw_without_ties(random: Random, case: Case, num_ranks: int, codec: str) -> Case:
    while True:
        drawn = case._replace(seed=random.randrange(10**6))
        gradients = [b.gradient_of(drawn, r, num_ranks).double().tolist() for r in range(num_ranks)]
        if not _is_compared(case) or _exchanged(gradients, codec)[1] > TIE:
            return drawn


def _exchanged(gradients: Sequence[Numbers], codec: str) -> tuple[list[Numbers], float]:
    """Return what each rank sends, and how close any number comes to a tie, in steps."""
    num_ranks, n = len(gradients), len(gradients[0])
    sizes = [n // num_ranks + (r < n % num_ranks) for r in range(num_ranks)]
    sent, margin = [[0.0] * n for _ in gradients], 1.0
    for owner, (start, stop) in enumerate(pairwise([0, *accumulate(sizes)])):
        coded = [_coded(gradient[start:stop], codec) for gradient in gradients]
        means = [sum(column) / num_ranks for column in zip(*(c for c, _ in coded), strict=True)]
        again, its_margin = _coded(means, codec)
        margin = min(margin, its_margin, *(m for _, m in coded))
        for rank, (chunk, _) in enumerate(coded):
            sent[rank][start:stop] = chunk
        lost = [num_ranks * (a - c) for a, c in zip(means, again, strict=True)]
        sent[owner][start:stop] = [a - c for a, c in zip(coded[owner][0], lost, strict=True)]
    return sent, margin


def _coded(x: Numbers, codec: str) -> tuple[Numbers, float]:
    """Return a codec's output, and how close the input is to one with a different output."""
    if not any(x) or codec == "Exact":
        return x, 1.0
    if codec == "Sign":
        scale = sum(map(abs, x)) / len(x)
        return [-scale if number < 0 else scale for number in x], min(map(abs, x)) / scale
    scale = max(map(abs, x)) / 127
    steps = [number / scale for number in x]
    return [round(s) * scale for s in steps], min(abs(abs(s - round(s)) - 0.5) for s in steps)


def _bytes_of_codes(n: int, codec: str, case: Case) -> tuple[float, str]:
    chunk = ceil(case.n / n)
    num_bytes = chunk if codec == "Int8" else ceil(chunk / 8)
    return 2 * (n - 1) * num_bytes, (
        f"{num_bytes} bytes of codes for a chunk of {chunk} entries, to each other rank twice: "
        "its chunk in codes, and the mean of one's own chunk in codes. Whole tensors to all "
        "ranks are too much, and so are numbers of 4 bytes."
    )


QUANTIZED = Compressor(
    "4.11",
    "quantized",
    worlds=[(1, "Int8"), (2, "Sign"), (5, "Exact"), (3, "Int8")],
    check_sent=_check_sent,
    costs=[(2, "Int8", Case(2431)), (5, "Sign", Case(2563)), (8, "Int8", Case(7))],
    most_bytes=_bytes_of_codes,
    cases=[*CASES, Case(4, seed=5)],
    draw=_draw_without_ties,
)
globals().update(QUANTIZED.tests())
