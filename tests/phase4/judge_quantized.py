"""Judges task 4.11: codes and their decoding, and an exchange in few bytes that loses nothing."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil, isfinite
from random import Random
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import short, short_beside
from judging.expect import expect
from phase4 import compressors as b
from phase4.compressor_contract import CASES, Compressor, Numbers
from phase4.compressors import Case

DTYPES = ["float32", "float64", "bfloat16"]
SCALE_SLACK = {"float32": 1e-5, "float64": 1e-5, "bfloat16": 1e-2}  # it may be taken in 16 bits
TIE = 1e-4  # rounding errors, in steps, that may turn a tie either way


# The codecs


def _code(
    grade: Grade, name: str, rows: list[Numbers], dtype: str = "float32"
) -> list[tuple[str, Numbers, dict[str, Any]]]:
    """Encode and decode rows of numbers; check dtypes, shapes, and that more bytes change nothing.

    Returns:
        Each row after its description, and before what came of it.
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
    """Check what a rank sent, unless bfloat16 or a tie may round it either way."""
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
    """Return what each rank sends, and how close a number comes to a tie, in steps."""
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
    """Return what comes out of a codec, and how close it was to something else."""
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
