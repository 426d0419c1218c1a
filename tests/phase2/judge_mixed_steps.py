"""Judges task 2.5: a step that computes in 16 bits and keeps 32, the same on all ranks."""

from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted
from judging.checks import is_close, of_members
from judging.comparing import check_equal
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import steps as b
from phase2 import steps_alone as reference
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
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_mixed_steps_are_those_of_one_process(grade: Grade, n: int) -> None:
    n = min(n, 3) if not grade.is_simulated else n
    shares = _uneven(grade, n)
    run = grade.run(b.mixed_steps, n, shares, STEPS, MAX_NORM, if_stuck=EVERY_CALL)
    _check_all(run.results, shares)
    if grade.is_simulated:
        _check_calls(run)


def _check_all(by_rank: list[Any], shares: tuple[Share, ...]) -> None:
    alone = reference.steps_alone(shares, STEPS, with_zeros=True, max_norm=MAX_NORM)
    for rank, result in enumerate(by_rank):
        here = f"{described(shares)}, rank {rank}"
        check_first_loss(here, result["losses"][0], shares, rank)
        _check_first_norm(here, result["norms"][0], alone["norms"][0])
        check_equal(
            *(here, f"whether the {STEPS} steps are skipped", [False] * STEPS, result["skipped"])
        )
        check_equal(
            here,
            f"in {STEPS} steps without an overflow, the scaler should be updated {STEPS} times, "
            "and its scale grow from 1024 to 2048 with interval 2: [updates, scale]",
            *([STEPS, 2048.0], result["updates"]),
        )
    check_steps(CONTRACT, by_rank, shares, STEPS, MAX_NORM)
    check_same_on_all(described(shares), by_rank, "losses", "norms")


def _check_first_norm(here: str, found: float, expected: float) -> None:
    cause = (
        "Does each target of all ranks weigh the same, are old gradients gone, and does a "
        "parameter that only other ranks use have a gradient?"
    )
    if found > 50 * expected:
        cause = "The gradients were still scaled: unscale them before you clip."
    elif is_close(found, MAX_NORM, 1e-3):
        cause = "That is the norm after clipping."
    what = "the norm of the averaged and unscaled gradient of the first step, before clipping,"
    check_equal(here, what, expected, found, cause, 1e-6)


def _check_calls(run: Run) -> None:
    sends = sum(event.kind == "send" for event in run.trace.events) if run.trace else 0
    check(
        run.collectives == [3 * STEPS] * len(run.results) and not sends,
        f"{STEPS} steps need {3 * STEPS} all-reduces on each rank: in each step one of two "
        "numbers, one of all gradients, and the scaler's one. By rank, the numbers of collectives "
        f"are {run.collectives}, and {sends} other messages were sent.",
    )


@task("2.5")
def test_mixed_steps_inside_a_group(grade: Grade) -> None:
    shares = _uneven(grade, len(MEMBERS))
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.mixed_steps, shares, STEPS, MAX_NORM),
        if_stuck=STUCK_IN_GROUP,
    )
    _check_all(of_members(run), shares)


def _called_with(autocast: Sequence[tuple[bool, str]]) -> str:
    """Say of each call whether autocast was on, and for which dtype."""
    calls = [f"autocast to {dtype}" if is_on else "autocast off" for is_on, dtype in autocast]
    return f"it was called with {', then with '.join(calls)}" if calls else "it was not called"


@task("2.5")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_it_computes_in_16_bits_and_keeps_32(grade: Grade, dtype: str) -> None:
    found, here = grade.call(b.step_noted, dtype), f"with dtype {dtype}"
    check(
        found["autocast"] == [(True, dtype)],
        f"{here}, loss_sum should be called once, under torch.autocast of the parameters' device "
        f"type and that dtype; {_called_with(found['autocast'])}.",
    )
    check_equal(
        here, "the dtypes that both linear layers compute in", [f"torch.{dtype}"], found["computed"]
    )
    check(
        found["kept"] == ["torch.float32"] and found["is_same"],
        "parameters and their gradients should stay in float32, and parameters should be the same "
        f"tensors as before; after the step they are in {' and '.join(found['kept'])}. autocast "
        "makes 16-bit copies of them by itself.",
    )
    check_equal(here, "the number of the scaler's updates in a step", 1, found["updates"])


@task("2.5")
def test_updates_that_16_bits_would_lose_add_up(grade: Grade) -> None:
    num_steps = grade.random.randint(8, 12)
    small = Small(1.0, 2.0**-13, [1.0, 1.0], [1, 1], num_steps=num_steps)
    for rank, found in enumerate(grade.run(b.small_steps, 2, small).results):
        check_equal(
            f"rank {rank} of 2",
            f"a weight of 1.0 after {num_steps} updates of -0.000122",
            *(1 - num_steps * 2.0**-13, found["weight"]),
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
        check(
            is_close(expected, found["weight"], abs(expected) / 100) and not found["skipped"],
            f"rank {rank} of 2, reduce_dtype {reduce_dtype}: a gradient of "
            f"{-expected / lr:.3g} and lr 2**20 should move the weight by {expected:.4g}; it "
            f"moved by {found['weight']:.4g}. float16 has nothing between 0 and 6e-8, so gradients "
            "must be scaled both in the backward pass and when they are summed.",
        )


def _check_overflow(by_rank: list[Any], is_bad: list[bool], what: str, scales: list[float]) -> None:
    for rank, steps in enumerate(by_rank):
        for number, (step, bad, scale) in enumerate(zip(steps, is_bad, scales, strict=True)):
            here = f"rank {rank} of {len(by_rank)}, step {number}, {what if bad else 'no overflow'}"
            check(
                step["is_skipped"] == bad and step["has_changed"] is not bad,
                f"{here}: the step should be {'skipped' if bad else 'taken'} on every rank; here "
                f"is_skipped is {step['is_skipped']}, and the parameters or Adam's state have "
                f"{'' if step['has_changed'] else 'not '}changed.",
            )
            check(
                step["scale"] == scale and step["updates"] == number + 1,
                f"{here}: afterwards the scale should be {scale} on every rank, and it should "
                f"have had {counted(number + 1, 'update')}, one in each step; it is "
                f"{step['scale']} and has had {counted(step['updates'], 'update')}.",
            )
            check(
                step["has_finite_norm"] is not bad,
                f"{here}: the norm before clipping should {'not ' if bad else ''}be finite.",
            )
            of_rank_0 = by_rank[0][number]["state"]
            check_equal(here, "parameters, which are those of rank 0,", of_rank_0, step["state"])
            _check_reported_loss(here, step, [steps[number]["sums"] for steps in by_rank])


def _check_reported_loss(here: str, step: Any, sums: list[Any]) -> None:
    numbers = [len(of_rank) for of_rank in sums]
    check(
        numbers == [1] * len(sums),
        f"{here}: loss_sum should be called once, also in a step that is skipped; by rank, the "
        f"numbers of calls are {numbers}.",
    )
    losses, counts = zip(*(of_rank[0] for of_rank in sums), strict=True)
    expected = sum(losses) / sum(counts)
    what = "the loss, which is the mean over the targets of all ranks also in a step that is "
    check_equal(here, f"{what}skipped,", expected, step["loss"], "", 1e-5 * abs(expected))


@task("2.5", real=True)
def test_an_overflow_on_one_rank_is_skipped_on_all(grade: Grade) -> None:
    for n in (2, 5) if grade.is_simulated else (3,):
        bad = [8.0 * n if rank == n - 1 else 2.0**-10 for rank in range(n)]
        good = [2.0**-10 * (1 + rank) for rank in range(n)]
        run = grade.run(b.overflow, n, [good, bad, good], "float32", if_stuck=EVERY_CALL)
        what = f"a gradient that overflows in float16 on rank {n - 1} only"
        _check_overflow(run.results, [False, True, False], what, [65536.0, 32768.0, 32768.0])


@task("2.5")
def test_an_overflow_in_a_group(grade: Grade) -> None:
    n = len(MEMBERS)
    by_step = [[8.0 * n, 2.0**-10, 2.0**-10], [2.0**-10] * n]
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.overflow, by_step, "float32"), if_stuck=STUCK_IN_GROUP
    )
    what = "a gradient that overflows in float16 on the group's rank 0 only"
    _check_overflow(of_members(run), [True, False], what, [32768.0, 32768.0])


@task("2.5")
def test_an_overflow_in_the_sum_alone_is_skipped(grade: Grade) -> None:
    run = grade.run(b.overflow, 2, [[1.375] * 2, [2.0**-10] * 2], "float16")
    what = "reduce_dtype float16, a scaled gradient of 45056 on each of 2 ranks, 90112 in all"
    _check_overflow(run.results, [True, False], what, [32768.0, 32768.0])


@task("2.5")
def test_gradients_are_divided_before_the_sum(grade: Grade) -> None:
    for rank, (step,) in enumerate(grade.run(b.overflow, 2, [[0.75] * 2], "float16").results):
        check(
            not step["is_skipped"] and step["scale"] == 65536.0,
            f"rank {rank} of 2, reduce_dtype float16, one target and a scaled gradient of 49152 on "
            "each rank. Divided by the 2 targets, they sum up to 49152, so the step should be "
            "taken. They were divided after the sum: 98304 is inf in float16.",
        )


@task("2.5")
@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16", "float16"])
def test_gradients_travel_in_one_bucket_of_reduce_dtype(grade: Grade, reduce_dtype: str) -> None:
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.mixed_sums, reduce_dtype), if_stuck=STUCK_IN_GROUP
    )
    for rank, found in enumerate(of_members(run)):
        here = f"rank {rank} of {len(MEMBERS)}, reduce_dtype {reduce_dtype}"
        large = [call for call in found["calls"] if call[0] > 2]
        check(
            large == [[found["trainable"], reduce_dtype]],
            f"{here}: the gradients of all {found['trainable']} trainable parameters should travel "
            f"in one all-reduce in {reduce_dtype}; the calls with more than two numbers are "
            f"{large}. A parameter without a gradient counts as zero, a frozen one not at all.",
        )
        others = [call for call in found["calls"] if call[0] <= 2]
        check(
            others in ([[2, "float32"]], [[2, "float64"]]),
            f"{here}: besides the gradients, sum of losses and number of targets should go through "
            f"the all_reduce given, two numbers in one call, in float32 or float64; these calls "
            f"are {others}.",
        )
        check(
            found["is_group_given"],
            f"{here}: all_reduce should be called with the group that the step was given.",
        )


@task("2.5")
def test_an_error_of_the_all_reduce_ends_the_step(grade: Grade) -> None:
    check_error_passed_on(grade, MIXED)


@task("2.5")
def test_a_mixed_step_without_any_target_is_refused(grade: Grade) -> None:
    results = grade.run(b.step_on_nothing, 3, MIXED, [2, 0, 1], if_stuck=EVERY_CALL).results
    check_nothing_steps(results, "a step where no rank has a target")
