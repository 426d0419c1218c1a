"""Judges task 4.11: codes and their decoding, two phases in few bytes, and no error is lost."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil, isfinite
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted
from judging.checks import short, short_beside
from judging.expect import expect, results_in_group
from phase4 import compressors as b
from phase4.compressor_contract import STUCK, Compressor
from phase4.compressors import Case, How

CODECS = ["Int8", "Sign"]
TURNS = [(1, "Sign"), (2, "Int8"), (3, "Sign"), (5, "Int8"), (8, "Sign"), (8, "Int8")]
DTYPES = ["float32", "float64", "bfloat16"]
SCALE_SLACK = {"float32": 1e-5, "float64": 1e-5, "bfloat16": 1e-2}  # it may be taken in 16 bits
TIE = 1e-4  # rounding errors, in steps, that may turn a tie either way
Numbers = list[float]


# The codecs


def _code(grade: Grade, name: str, x: Numbers, dtype: str = "float32") -> dict[str, Any]:
    """Encode and decode; check dtypes and shapes, and that more bytes change nothing."""
    found: dict[str, Any] = grade.call(b.code, name, x, dtype)
    where = f"{name} of {short(x)}, {dtype}"
    num_bytes = len(x) if name == "Int8" else ceil(len(x) / 8)
    right = {"codes": ["uint8", [num_bytes]], "scale": ["float32", []]}
    for what, kind in (right | {"decoded numbers": ["float32", [len(x)]]}).items():
        expect(f"{where}: dtype and shape of the {what}", found["kinds"][what], kind)
    check(not found["changed"], f"{where}: encode has changed x, which is the caller's.")
    check(
        str(found["longer"]) == str(found["decoded"]),
        f"{where}: with more bytes after the codes, other numbers come out: "
        f"{short_beside(found['longer'], found['decoded'])}, not "
        f"{short_beside(found['decoded'], found['longer'])}. Decode the first n codes.",
    )
    return found


def _numbers(grade: Grade, n: int, dtype: str) -> Numbers:
    case = Case(n, dtype, seed=grade.random.randrange(10**6))
    numbers: Numbers = b.gradient_of(case, 0, 1).double().tolist()
    return numbers


@task("4.11")
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_rounds_to_the_nearest_step(grade: Grade, dtype: str) -> None:
    for n, factor in ((1, 1.0), (6, 1.0), (101, 1.0), (101, 1e-30), (101, 1e30)):
        x = [factor * one for one in _numbers(grade, n, dtype)]
        found, where = _code(grade, "Int8", x, dtype), f"Int8 of {n} numbers, {dtype}"
        scale, right = found["scale"], max(map(abs, x)) / 127
        slack = SCALE_SLACK[dtype]
        expect(f"{where}: the scale, max|x| / 127,", scale, right, "", slack * right)
        for one, got in zip(x, found["decoded"], strict=True):
            steps = got / scale
            check(
                abs(got - one) <= scale * (0.5 + 128 * slack) and abs(steps) < 127.01,
                f"{where}: {one:.6g} comes out as {got:.6g}, {abs(got - one) / scale:.3g} steps "
                f"away; {scale:.6g} is a step, and half a step is the most. Round to the nearest "
                "step, do not cut off, and keep the sign.",
            )
            check(
                abs(steps - round(steps)) < 1e-3,
                f"{where}: {got:.6g} is not a whole number of steps of {scale:.6g}.",
            )


@task("4.11")
def test_zeros_stay_zero_in_int8(grade: Grade) -> None:
    for x in ([0.0, 0.0, 0.0], [0.0, 3.0, 0.0, -5.0], [0.0], []):
        found = _code(grade, "Int8", x)
        zeros = [got for one, got in zip(x, found["decoded"], strict=True) if one == 0]
        check(
            not any(zeros) and all(map(isfinite, found["decoded"])),
            f"Int8 of {x}: zeros should stay 0, also where the scale is 0, and nothing may be "
            f"divided by that; what comes out is {found['decoded']}.",
        )
        check(
            found["scale"] == 0 if not any(x) else found["scale"] > 0,
            f"Int8 of {x}: the scale should be 0 where all is 0, and only there; it is "
            f"{found['scale']}.",
        )


@task("4.11")
@pytest.mark.parametrize("dtype", DTYPES)
def test_sign_keeps_signs_and_the_mean_magnitude(grade: Grade, dtype: str) -> None:
    for n in (0, 1, 7, 8, 9, 101):
        for x in ([0.0] * n, _numbers(grade, n, dtype)):
            x[n // 2 : n // 2 + 1] = [0.0] * min(n, 1)
            found, where = _code(grade, "Sign", x, dtype), f"Sign of {n} numbers, {dtype}"
            scale = sum(map(abs, x)) / max(n, 1)
            slack = SCALE_SLACK[dtype] * scale
            expect(f"{where}: the scale, the mean of |x|,", found["scale"], scale, "", slack)
            expect(
                f"{where}: the numbers that are decoded",
                *(found["decoded"], [-scale if one < 0 else scale for one in x]),
                f"A 0, such as number {n // 2}, counts as positive.",
                slack,
            )


@task("4.11")
@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_is_seen(grade: Grade, name: str) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        found = _code(grade, name, [1.0, bad, -2.0, 0.5, -0.25, 3.0, 1.5, 2.5, -1.0])
        check(
            not any(map(isfinite, found["decoded"])),
            f"{name} of numbers of which one is {bad}: no number that comes out should be finite, "
            f"so that it is seen everywhere; these come out: {short(found['decoded'])}. The scale "
            "shows it if it is NaN or infinite.",
        )


# The exchange


def _any_sent(where: str, case: Case, gradient: Numbers, sent: Numbers) -> None:
    """Accept everything: ``_check_chunks`` compares what was sent, on all ranks together."""


def _all_is_sent(where: str, case: Case, gradient: Numbers, sent: Numbers) -> None:
    expect(
        *(f"{where}, with a codec that loses nothing: sent", sent, gradient),
        "Call encode and decode of the codec that is given, chunk by chunk, and give decode the "
        "number of entries.",
        1e-5 if case.dtype != "bfloat16" else 0.1,
    )


def _quantized(codec: str) -> Compressor:
    return Compressor(How("quantized", codec), _all_is_sent if codec == "Exact" else _any_sent)


@task("4.11", real=True)
@pytest.mark.parametrize(("num_ranks", "codec"), [(2, "Int8"), (2, "Sign"), (3, "Int8")])
def test_quantized_loses_no_error(grade: Grade, num_ranks: int, codec: str) -> None:
    _quantized(codec).check(grade, num_ranks)


@task("4.11")
@pytest.mark.parametrize(("num_ranks", "codec"), [(1, "Int8"), (5, "Sign"), (8, "Int8")])
def test_quantized_on_other_numbers_of_ranks(grade: Grade, num_ranks: int, codec: str) -> None:
    _quantized(codec).check(grade, num_ranks)


@task("4.11")
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_quantized_uses_any_codec(grade: Grade, num_ranks: int) -> None:
    _quantized("Exact").check(grade, num_ranks)


@task("4.11")
@pytest.mark.parametrize(("num_ranks", "codec"), TURNS)
def test_quantized_encodes_chunks_and_their_means(grade: Grade, num_ranks: int, codec: str) -> None:
    cases = [_case_without_ties(grade, n, num_ranks, codec) for n in (1, 4, 30)]
    how = How("quantized", codec)
    run = grade.run(b.reduce_all, num_ranks, how, cases, if_stuck=STUCK)
    for place, case in enumerate(cases):
        _check_chunks(case, codec, [of_rank[place] for of_rank in run.results])


@task("4.11")
@pytest.mark.parametrize("codec", CODECS)
def test_quantized_inside_a_group(grade: Grade, codec: str) -> None:
    case = _case_without_ties(grade, 30, 3, codec)
    _quantized(codec)._replace(cases=[case]).check_in_group(grade)
    results = results_in_group(grade, b.reduce_all, How("quantized", codec), [case])
    _check_chunks(case, codec, [result for (result,) in results], "inside a group, ")


def _case_without_ties(grade: Grade, n: int, num_ranks: int, codec: str) -> Case:
    while True:
        case = Case(n, seed=grade.random.randrange(10**6))
        if _exchanged(_gradients(case, num_ranks), codec)[2] > TIE:
            return case


def _gradients(case: Case, num_ranks: int) -> list[Numbers]:
    return [b.gradient_of(case, rank, num_ranks).double().tolist() for rank in range(num_ranks)]


def _exchanged(gradients: Sequence[Numbers], codec: str) -> tuple[Numbers, list[Numbers], float]:
    """Return the mean, what each rank sends, and how close a number comes to a tie, in steps."""
    num_ranks, n = len(gradients), len(gradients[0])
    sizes = [n // num_ranks + (r < n % num_ranks) for r in range(num_ranks)]
    bounds = [0, *accumulate(sizes)]
    mean, sent, margin = [], [[0.0] * n for _ in gradients], 1.0
    for owner, (start, stop) in enumerate(pairwise(bounds)):
        coded = [_coded(gradient[start:stop], codec) for gradient in gradients]
        means = [sum(column) / num_ranks for column in zip(*(c for c, _ in coded), strict=True)]
        again, its_margin = _coded(means, codec)
        margin = min(margin, its_margin, *(m for _, m in coded))
        mean += again
        for rank, (chunk, _) in enumerate(coded):
            sent[rank][start:stop] = chunk
        lost = [num_ranks * (a - c) for a, c in zip(means, again, strict=True)]
        sent[owner][start:stop] = [a - c for a, c in zip(coded[owner][0], lost, strict=True)]
    return mean, sent, margin


def _coded(x: Numbers, codec: str) -> tuple[Numbers, float]:
    """Return what comes out of a codec, and how close it was to something else."""
    if not any(x):
        return [0.0] * len(x), 1.0
    if codec == "Sign":
        scale = sum(map(abs, x)) / len(x)
        return [-scale if one < 0 else scale for one in x], min(map(abs, x)) / scale
    scale = max(map(abs, x)) / 127
    steps = [one / scale for one in x]
    return [round(one) * scale for one in steps], min(abs(abs(s - round(s)) - 0.5) for s in steps)


def _check_chunks(case: Case, codec: str, by_rank: Sequence[Any], where: str = "") -> None:
    num_ranks = len(by_rank)
    gradients = _gradients(case, num_ranks)
    mean, sent, _ = _exchanged(gradients, codec)
    slack = 1e-5 * max(abs(x) for gradient in gradients for x in gradient) * num_ranks
    for rank, found in enumerate(by_rank):
        entries = counted(case.n, "entry", "entries")
        here = f"{where}{codec} of {entries}, rank {rank} of {num_ranks}"
        expect(
            *(f"{here}: the mean", found["mean"], mean),
            "Rank r's chunk is the r-th of tensor_split. Each rank encodes each chunk with a scale "
            "of its own; the owner averages what it decodes, and encodes the mean, again with its "
            "own scale.",
            slack,
        )
        expect(
            *(f"{here}: sent", found["sent"], sent[rank]),
            "It is what was encoded, decoded again; in its own chunk an owner takes away N times "
            "(mean - decoded mean).",
            slack,
        )


@task("4.11")
@pytest.mark.parametrize(("num_ranks", "codec"), TURNS)
def test_quantized_sends_codes_both_ways(grade: Grade, num_ranks: int, codec: str) -> None:
    for n in (grade.random.randrange(2000, 3000), max(1, num_ranks - 1)):
        chunk = ceil(n / num_ranks)
        num_bytes = chunk if codec == "Int8" else ceil(chunk / 8)
        _quantized(codec).check_bytes(
            *(grade, num_ranks, Case(n), 2 * (num_ranks - 1) * num_bytes),
            f"{num_bytes} bytes of codes for a chunk of {chunk} entries, to each other rank twice: "
            "its chunk in codes, and the mean of one's own chunk in codes. Whole tensors to all "
            "ranks are too much, and so are numbers of 4 bytes.",
        )


@task("4.11")
@pytest.mark.parametrize(("codec", "tolerance"), [("Int8", 0.05), ("Sign", 0.3)])
def test_quantized_trains_with_feedback(grade: Grade, codec: str, tolerance: float) -> None:
    _quantized(codec).check_training(grade, 2, tolerance)
