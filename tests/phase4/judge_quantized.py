"""Judges task 4.11: codes and their decoding, two phases in few bytes, and no error is lost."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil, isfinite
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted
from judging.checks import is_close, of_members, short, short_beside
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase4 import reduced as b
from phase4.reduced import Case, How
from phase4.reduced_checks import (
    CASES,
    RING,
    STUCK,
    check_bytes,
    check_cases,
    check_reduced,
    check_training,
)

CODECS = ["Int8", "Sign"]
TURNS = [(1, "Sign"), (2, "Int8"), (3, "Sign"), (5, "Int8"), (8, "Sign"), (8, "Int8")]
DTYPES = ["float32", "float64", "bfloat16"]
NUM_STEPS, NUM_PARAMETERS = 300, 12
SCALE_SLACK = {"float32": 1e-5, "float64": 1e-5, "bfloat16": 1e-2}  # it may be taken in 16 bits
TIE = 1e-4  # of a step: rounding of less may go either way
Numbers = list[float]


# The codecs


def _code(grade: Grade, name: str, x: Numbers, dtype: str = "float32") -> dict[str, Any]:
    found = grade.call(b.code, name, x, dtype)
    where = f"{name} of {short(x)}, {dtype}"
    num_bytes = len(x) if name == "Int8" else ceil(len(x) / 8)
    for what, key, kind in (
        ("the codes", "payload", ("uint8", (num_bytes,))),
        ("the scale", "scale_kind", ("float32", ())),
        ("the decoded numbers", "decoded_kind", ("float32", (len(x),))),
    ):
        got = found[key][0], tuple(found[key][1])
        check(
            got == kind,
            f"{where}: {what} should be {kind[0]} of shape {kind[1]}, but are {got[0]} of shape "
            f"{got[1]}.",
        )
    check(not found["changed"], f"{where}: encode has changed x, which is the caller's.")
    return found


def _check_decoded(where: str, found: dict[str, Any], wanted: Numbers, slack: float) -> None:
    for what, key in (("", "decoded"), (" with more bytes behind its codes", "longer")):
        check(
            is_close(found[key], wanted, slack),
            f"{where}: what is encoded and decoded{what} should be "
            f"{short_beside(wanted, found[key])}, but is {short_beside(found[key], wanted)}.",
        )


@task("4.11")
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_rounds_to_the_nearest_step(grade: Grade, dtype: str) -> None:
    for n in (1, 6, 101):
        case = Case(n, dtype, seed=grade.random.randrange(10**6))
        x = b.gradient_of(case, 0, 1).double().tolist()
        found, where = _code(grade, "Int8", x, dtype), f"Int8 of {n} numbers, {dtype}"
        scale, wanted = found["scale"], max(map(abs, x)) / 127
        slack = SCALE_SLACK[dtype]
        check(
            abs(scale - wanted) <= slack * wanted,
            f"{where}: the scale should be max|x| / 127 = {wanted:.6g}; it is {scale:.6g}.",
        )
        check(
            is_close(found["longer"], found["decoded"]),
            f"{where}: with more bytes behind the codes, other numbers come out. Decode the first "
            "n codes.",
        )
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
    for n in (1, 7, 8, 9, 101):
        case = Case(n, dtype, seed=grade.random.randrange(10**6))
        x = b.gradient_of(case, 0, 1).double().tolist()
        x[n // 2] = 0.0
        found, where = _code(grade, "Sign", x, dtype), f"Sign of {n} numbers, {dtype}"
        scale = sum(map(abs, x)) / n
        slack = SCALE_SLACK[dtype] * scale
        check(
            abs(found["scale"] - scale) <= slack,
            f"{where}: the scale should be the mean of |x|, {scale:.6g}; it is "
            f"{found['scale']:.6g}.",
        )
        wanted = [-scale if one < 0 else scale for one in x]
        _check_decoded(f"{where}, of which one is 0 and counts as positive", found, wanted, slack)


@task("4.11")
def test_sign_of_zeros_and_of_nothing(grade: Grade) -> None:
    for n in (0, 1, 11):
        found = _code(grade, "Sign", [0.0] * n)
        _check_decoded(f"Sign of {n} zeros", found, [0.0] * n, 0.0)
        check(found["scale"] == 0, f"Sign of {n} zeros: the scale is {found['scale']}, not 0.")


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
    """Don't judge what was sent by itself: `_check_chunks` compares it on all ranks."""


def _how(codec: str) -> How:
    return How("quantized", codec)


@task("4.11", real=True)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_quantized_loses_no_error(grade: Grade, num_ranks: int, codec: str) -> None:
    check_cases(grade, _how(codec), CASES, num_ranks, _any_sent)


@task("4.11")
@pytest.mark.parametrize(("num_ranks", "codec"), [(1, "Int8"), (5, "Sign"), (8, "Int8")])
def test_quantized_on_other_numbers_of_ranks(grade: Grade, num_ranks: int, codec: str) -> None:
    check_cases(grade, _how(codec), CASES, num_ranks, _any_sent)


@task("4.11")
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_quantized_uses_any_codec(grade: Grade, num_ranks: int) -> None:
    check_cases(grade, _how("Exact"), CASES, num_ranks, _all_is_sent)


def _all_is_sent(where: str, case: Case, gradient: Numbers, sent: Numbers) -> None:
    check(
        is_close(sent, gradient, 1e-5 if case.dtype != "bfloat16" else 0.1),
        f"{where}, with a codec that loses nothing: sent should be the gradient, "
        f"{short_beside(gradient, sent)}; it is {short_beside(sent, gradient)}. Call encode and "
        "decode of the codec that is given, chunk by chunk, and give decode the number of entries.",
    )


@task("4.11")
@pytest.mark.parametrize(("num_ranks", "codec"), TURNS)
def test_quantized_encodes_chunks_and_their_means(grade: Grade, num_ranks: int, codec: str) -> None:
    cases = [_case_without_ties(grade, n, num_ranks, codec) for n in (1, 4, 30)]
    run = grade.run(b.reduce_all, num_ranks, _how(codec), cases, if_stuck=STUCK)
    for place, case in enumerate(cases):
        _check_chunks(case, codec, [of_rank[place] for of_rank in run.results])


def _gradients(case: Case, num_ranks: int) -> list[Numbers]:
    return [b.gradient_of(case, rank, num_ranks).double().tolist() for rank in range(num_ranks)]


def _case_without_ties(grade: Grade, n: int, num_ranks: int, codec: str) -> Case:
    while True:
        case = Case(n, seed=grade.random.randrange(10**6))
        if _exchanged(_gradients(case, num_ranks), codec)[2] > TIE:
            return case


def _exchanged(gradients: Sequence[Numbers], codec: str) -> tuple[Numbers, list[Numbers], float]:
    """Return the mean, what each rank sends, and how close a number comes to a tie, in steps."""
    num_ranks, n = len(gradients), len(gradients[0])
    sizes = [n // num_ranks + (r < n % num_ranks) for r in range(num_ranks)]
    bounds = [0, *accumulate(sizes)]
    mean, sent, margin = [], [[0.0] * n for _ in gradients], 1.0
    for owner, (start, stop) in enumerate(pairwise(bounds)):
        coded = [_coded(one[start:stop], codec) for one in gradients]
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
    margins = [abs(abs(one - round(one)) - 0.5) for one in steps]
    return [round(one) * scale for one in steps], min(margins)


def _check_chunks(case: Case, codec: str, by_rank: Sequence[Any], where: str = "") -> None:
    num_ranks = len(by_rank)
    gradients = _gradients(case, num_ranks)
    mean, sent, _ = _exchanged(gradients, codec)
    slack = 1e-5 * max(abs(x) for one in gradients for x in one) * num_ranks
    for rank, found in enumerate(by_rank):
        told = (
            f"{where}{codec} of {counted(case.n, 'entry', 'entries')}, rank {rank} of {num_ranks}"
        )
        check(
            is_close(found["mean"], mean, slack),
            f"{told}: the mean should be {short_beside(mean, found['mean'])}; it is "
            f"{short_beside(found['mean'], mean)}. Rank r's chunk is the r-th of tensor_split. "
            "Each rank encodes each chunk with a scale of its own; the owner averages what it "
            "decodes, and encodes the mean, again with its own scale.",
        )
        check(
            is_close(found["sent"], sent[rank], slack),
            f"{told}: sent should be {short_beside(sent[rank], found['sent'])}; it is "
            f"{short_beside(found['sent'], sent[rank])}. It is what was encoded, decoded again; in "
            "its own chunk an owner takes away N times (mean - decoded mean).",
        )


@task("4.11")
@pytest.mark.parametrize(("num_ranks", "codec"), TURNS)
def test_quantized_sends_codes_both_ways(grade: Grade, num_ranks: int, codec: str) -> None:
    sizes = (grade.random.randrange(2000, 3000), max(1, num_ranks - 1))
    for n in sizes:
        run = grade.run(
            b.reduce_all, num_ranks, _how(codec), [Case(n)], options=RING, if_stuck=STUCK
        )
        chunk = ceil(n / num_ranks)
        num_bytes = chunk if codec == "Int8" else ceil(chunk / 8)
        check_bytes(
            *(run, 2 * (num_ranks - 1) * num_bytes),
            f"{num_bytes} bytes of codes for a chunk of {chunk} entries, to each other rank twice: "
            "its chunk in codes, and the mean of one's own chunk in codes. Whole tensors to all "
            "ranks are too much, and so are numbers of 4 bytes.",
        )


@task("4.11")
@pytest.mark.parametrize("codec", CODECS)
def test_quantized_inside_a_group(grade: Grade, codec: str) -> None:
    how, case = _how(codec), _case_without_ties(grade, 30, 3, codec)
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.reduce_all, how, [case]), if_stuck=STUCK_IN_GROUP
    )
    check_reduced(of_members(run), how, [case], _any_sent)
    _check_chunks(case, codec, [found for (found,) in of_members(run)], "inside a group, ")


@task("4.11")
@pytest.mark.parametrize("codec", CODECS)
def test_quantized_trains_with_feedback(grade: Grade, codec: str) -> None:
    args = (_how(codec), NUM_PARAMETERS, NUM_STEPS, "own")
    run = grade.run(b.train, 2, *args, if_stuck=STUCK)
    check_training(run, NUM_PARAMETERS, TRAINED[codec], f"{NUM_STEPS} steps with {codec}")


TRAINED = {"Int8": 0.05, "Sign": 0.3}
