"""Judges task 2.5: a step that computes in 16 bits and keeps 32, the same on all ranks."""

from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import check_collectives, is_close
from judging.expect import expect, results_in_group
from judging.groups import MEMBERS
from phase2 import step_checks as reference
from phase2 import steps as b
from phase2.step_checks import (
    Contract,
    check_error_passed_on,
    check_first_loss,
    check_nothing_steps,
    check_same_on_all,
    check_steps,
    described,
)
from phase2.steps import MIXED, Share, Small

STEPS = 3
MAX_NORM = 0.25  # less than the norm of some steps
EVERY_CALL = (
    "Every rank must make the same calls, also one that has an empty batch or whose own gradients "
    "are not finite."
)
ORDER = (
    "Gradients are summed over the ranks, then unscaled, then clipped by the norm of all of them; "
    "those from before the step do not count."
)
CONTRACT = Contract(
    MIXED,
    with_zeros=True,
    of_length=f"Each target of all ranks weighs the same. {ORDER}",
    of_end=ORDER,
    of_unused="A parameter without a gradient counts as zero, so that weight decay changes it.",
)


def _uneven(grade: Grade, n: int) -> tuple[Share, ...]:
    """Draw the number of rows of each rank: none on rank 1 of 3 or more, most on rank 0."""
    rows = [grade.random.randint(5, 8), *(grade.random.randint(1, 4) for _ in range(n - 1))]
    return tuple(Share(0 if rank == 1 and n > 2 else size, 0) for rank, size in enumerate(rows))


@task("2.5", real=True)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_mixed_steps_are_those_of_one_process(grade: Grade, n: int) -> None:
    n = min(n, 3) if not grade.is_simulated else n
    shares = _uneven(grade, n)
    run = grade.run(b.mixed_steps, n, shares, STEPS, MAX_NORM, if_stuck=EVERY_CALL)
    _check_all(run.results, shares)
    if grade.is_simulated:
        what = f"{STEPS} steps, each with an all-reduce of two numbers, of all gradients, and the "
        check_collectives(run, [3 * STEPS] * n, what + "scaler's")


def _check_all(by_rank: list[Any], shares: tuple[Share, ...]) -> None:
    alone = reference.steps_alone(shares, STEPS, with_zeros=True, max_norm=MAX_NORM)
    for rank, result in enumerate(by_rank):
        here = f"{described(shares)}, rank {rank}"
        check_first_loss(here, result["losses"][0], shares, rank)
        found, expected = result["norms"][0], alone["norms"][0]
        cause = (
            "Does each target of all ranks weigh the same, are old gradients gone, and does a "
            "parameter that only other ranks use have a gradient?"
        )
        if found > 50 * expected:
            cause = "The gradients were still scaled: unscale them before you clip."
        elif is_close(found, MAX_NORM, 1e-3):
            cause = "That is the norm after clipping."
        what = "the norm of the averaged and unscaled gradient of the first step, before clipping,"
        expect(f"{here}: {what}", found, expected, cause, 1e-6)
        expect(
            f"{here}: whether each step is skipped, the number of the scaler's updates, and its "
            f"scale, which starts at 1024 and has interval 2, after {STEPS} steps without an "
            "overflow,",
            [result["skipped"], *result["updates"]],
            [[False] * STEPS, STEPS, 2048.0],
        )
    check_steps(CONTRACT, by_rank, shares, STEPS, MAX_NORM)
    check_same_on_all(described(shares), by_rank, "losses", "norms")


@task("2.5")
def test_mixed_steps_inside_a_group(grade: Grade) -> None:
    shares = _uneven(grade, len(MEMBERS))
    _check_all(results_in_group(grade, b.mixed_steps, shares, STEPS, MAX_NORM), shares)


@task("2.5")
@pytest.mark.parametrize(
    ("dtype", "reduce_dtype"),
    [("float16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")],
)
def test_it_computes_in_16_bits_and_keeps_32(grade: Grade, dtype: str, reduce_dtype: str) -> None:
    for rank, found in enumerate(results_in_group(grade, b.step_noted, dtype, reduce_dtype)):
        here = f"rank {rank} of {len(MEMBERS)}, dtype {dtype}, reduce_dtype {reduce_dtype}"
        _check_dtypes(here, found, dtype)
        _check_calls(f"{here}: the calls of all_reduce", found, reduce_dtype)


def _check_dtypes(here: str, found: Any, dtype: str) -> None:
    expect(
        f"{here}: the calls of loss_sum, by whether autocast is on, and for which dtype,",
        found["autocast"],
        [(True, dtype)],
        "Call it once, under torch.autocast of the parameters' device type and that dtype.",
    )
    what = "the dtypes that both linear layers compute in"
    expect(f"{here}: {what}", found["computed"], [f"torch.{dtype}"])
    expect(
        f"{here}: the dtypes of parameters and gradients after the step, and whether parameters "
        "are the same tensors as before,",
        [found["kept"], found["is_same"]],
        [["torch.float32"], True],
        "autocast makes 16-bit copies of them by itself.",
    )
    expect(f"{here}: the number of the scaler's updates in a step", found["updates"], 1)


def _check_calls(here: str, found: Any, reduce_dtype: str) -> None:
    expect(
        f"{here} with more than two numbers",
        [call for call in found["calls"] if call[0] > 2],
        [[found["trainable"], reduce_dtype]],
        "The gradients of all trainable parameters travel in one bucket. A parameter without a "
        "gradient counts as zero, a frozen one not at all.",
    )
    wide = [call for call in found["calls"] if call[0] <= 2]
    expect(
        f"{here} with sum of losses and number of targets, in float32 or float64,",
        wide,
        [[2, "float64" if wide == [[2, "float64"]] else "float32"]],
    )
    check(found["is_group_given"], f"{here} should get the group that the step was given.")


@task("2.5")
def test_updates_that_16_bits_would_lose_add_up(grade: Grade) -> None:
    num_steps = grade.random.randint(8, 12)
    small = Small(1.0, 2.0**-13, [1.0, 1.0], [1, 1], num_steps=num_steps)
    for rank, found in enumerate(grade.run(b.small_steps, 2, small).results):
        expect(
            f"rank {rank} of 2: a weight of 1.0 after {num_steps} updates of -0.000122",
            found["weight"],
            1 - num_steps * 2.0**-13,
            "float16 has no number between 0.9995 and 1: the optimizer should update the "
            "parameters in float32.",
            1e-7,
        )


@task("2.5")
@pytest.mark.parametrize("reduce_dtype", ["float16", "float32"])
def test_small_gradients_survive(grade: Grade, reduce_dtype: str) -> None:
    """Of 2**-26: float16 ends at 2**-24, so they must be scaled in backward and in the sum."""
    factors, rows, lr = [2.0**-26, 3 * 2.0**-26], [3, 1], 2.0**20
    expected = -lr * (3 * factors[0] + factors[1]) / 4
    small = Small(0.0, lr, factors, rows, reduce_dtype)
    for rank, found in enumerate(grade.run(b.small_steps, 2, small).results):
        here = f"rank {rank} of 2, reduce_dtype {reduce_dtype}, a gradient of {-expected / lr:.3g}"
        expect(f"{here}: whether a step is skipped", found["skipped"], False)
        expect(
            f"{here} and lr 2**20: the weight, at first 0,",
            found["weight"],
            expected,
            "float16 has nothing between 0 and 6e-8, so gradients must be scaled both in the "
            "backward pass and when they are summed.",
            abs(expected) / 100,
        )


def _check_overflow(by_rank: list[Any], is_bad: list[bool], what: str, scales: list[float]) -> None:
    for rank, steps in enumerate(by_rank):
        for number, (step, bad, scale) in enumerate(zip(steps, is_bad, scales, strict=True)):
            here = f"rank {rank} of {len(by_rank)}, step {number}, {what if bad else 'no overflow'}"
            expect(
                f"{here}: whether the step is skipped, whether parameters or Adam's state change, "
                "and whether the norm before clipping is finite",
                [step[name] for name in ("is_skipped", "has_changed", "has_finite_norm")],
                [bad, not bad, not bad],
                "All ranks skip a step, or none.",
            )
            found = [step["scale"], step["updates"]]
            expect(f"{here}: scale and number of updates so far", found, [scale, number + 1])
            of_rank_0 = by_rank[0][number]["state"]
            expect(f"{here}: the parameters, which are those of rank 0,", step["state"], of_rank_0)
            calls = [of_rank[number]["sums"] for of_rank in by_rank]
            what_calls = "the numbers of calls of loss_sum by rank, also in a step that is skipped,"
            expect(f"{here}: {what_calls}", [*map(len, calls)], [1] * len(calls))
            losses, counts = zip(*(sums for (sums,) in calls), strict=True)
            mean = sum(losses) / sum(counts)
            what_loss = "the loss, the mean over the targets of all ranks also in a skipped step,"
            expect(f"{here}: {what_loss}", step["loss"], mean, "", 1e-5 * abs(mean))


@task("2.5", real=True)
def test_an_overflow_on_one_rank_is_skipped_on_all(grade: Grade) -> None:
    for n in (2, 5) if grade.is_simulated else (3,):
        bad = [8.0 * n if rank == n - 1 else 2.0**-10 for rank in range(n)]
        good = [2.0**-10 * (1 + rank) for rank in range(n)]
        run = grade.run(b.overflow, n, [good, bad, good], "float32", if_stuck=EVERY_CALL)
        what = f"a gradient that overflows in float16 on rank {n - 1} only"
        _check_overflow(run.results, [False, True, False], what, [65536.0, 32768.0, 32768.0])


@task("2.5")
def test_an_overflow_in_the_sum_alone_is_skipped(grade: Grade) -> None:
    run = grade.run(b.overflow, 2, [[1.375] * 2, [2.0**-10] * 2], "float16")
    what = "reduce_dtype float16, a scaled gradient of 45056 on each of 2 ranks, 90112 in all"
    _check_overflow(run.results, [True, False], what, [32768.0, 32768.0])


@task("2.5")
def test_gradients_are_divided_before_the_sum(grade: Grade) -> None:
    for rank, (step,) in enumerate(grade.run(b.overflow, 2, [[0.75] * 2], "float16").results):
        expect(
            f"rank {rank} of 2, reduce_dtype float16, one target and a scaled gradient of 49152 on "
            "each rank: whether the step is skipped, and the scale",
            [step["is_skipped"], step["scale"]],
            [False, 65536.0],
            "Divided by the 2 targets, gradients sum up to 49152; divided after the sum, 98304 is "
            "inf in float16.",
        )


@task("2.5")
def test_an_error_of_the_all_reduce_ends_the_step(grade: Grade) -> None:
    check_error_passed_on(grade, MIXED)


@task("2.5")
def test_a_mixed_step_without_any_target_is_refused(grade: Grade) -> None:
    results = grade.run(b.step_on_nothing, 3, MIXED, [2, 0, 1], if_stuck=EVERY_CALL).results
    check_nothing_steps(results, "a step where no rank has a target")
