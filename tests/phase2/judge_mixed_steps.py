"""Judges task 2.5: a step that computes in 16 bits and keeps 32, the same on all ranks."""

from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted
from judging.checks import check_refused, is_close, of_members, same_loss, short
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import mixed_reference as reference
from phase2 import mixed_steps as b

STEPS = 3
MAX_NORM = 0.25  # less than the norm of some steps
EVERY_CALL = (
    "Every rank must make the same calls, also one that has an empty batch or whose own gradients "
    "are not finite."
)


def _uneven(grade: Grade, n: int) -> list[int]:
    """Draw the number of rows of each rank: none on rank 1 of 3 or more, most on rank 0."""
    sizes = [grade.random.randint(5, 8), *(grade.random.randint(1, 4) for _ in range(n - 1))]
    return [0 if rank == 1 and n > 2 else size for rank, size in enumerate(sizes)]


@task("2.5", real=True)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_mixed_steps_are_those_of_one_process(grade: Grade, n: int) -> None:
    n = min(n, 3) if not grade.is_simulated else n
    sizes = _uneven(grade, n)
    run = grade.run(b.train_steps, n, sizes, STEPS, MAX_NORM, if_stuck=EVERY_CALL)
    _check_all(run.results, sizes)
    if grade.is_simulated:
        _check_calls(run)


def _check_all(by_rank: list[Any], sizes: list[int]) -> None:
    alone = reference.steps_alone(tuple(sizes), STEPS, MAX_NORM)
    for rank, result in enumerate(by_rank):
        here = f"batches of {sizes}, rank {rank}"
        _check_first_loss(here, result["losses"][0], alone["losses"][0], sizes)
        _check_first_norm(here, result["norms"][0], alone["norms"][0])
        _check_updates(here, result)
        check(
            is_close(alone["state"], result["state"], 1e-6)
            and same_loss(alone["losses"], result["losses"]),
            f"{here}: the first loss and norm are right, but after {STEPS} steps with max_norm "
            f"{MAX_NORM} the weights differ from those of one process, or the losses do: they are "
            f"{short(result['losses'])} and should be {short(alone['losses'])}. Gradients are "
            "summed over the ranks, then unscaled, then clipped by the norm of all of them; those "
            "from before the step do not count.",
        )
        check(
            result["losses"] == by_rank[0]["losses"] and result["norms"] == by_rank[0]["norms"],
            f"{here}: loss and norm should be exactly those of rank 0. Compute them from what the "
            "all-reduce returns, which is the same on all ranks.",
        )
        _check_once(here, result, sizes[rank])


def _check_first_loss(here: str, found: float, expected: float, sizes: list[int]) -> None:
    cause = ""
    if len(sizes) > 1 and same_loss(found, reference.mean_of_means(tuple(sizes))):
        cause = " That is the mean of the ranks' means, in which small batches count too much."
    check(
        same_loss(expected, found),
        f"{here}: one process that trains on all batches has a first loss of {expected:.6f}; yours "
        f"is {found:.6f}. The loss is the mean over the targets of all ranks, before the step and "
        f"not scaled, and a target of -100 does not count.{cause}",
    )


def _check_first_norm(here: str, found: float, expected: float) -> None:
    cause = (
        " Does each target of all ranks weigh the same, are old gradients gone, and does a "
        "parameter that only other ranks use have a gradient?"
    )
    if found > 50 * expected:
        cause = " The gradients were still scaled: unscale them before you clip."
    elif is_close(found, MAX_NORM, 1e-3):
        cause = " That is the norm after clipping."
    check(
        is_close(expected, found, 1e-6),
        f"{here}: in the first step, the norm of the averaged and unscaled gradient, before "
        f"clipping, should be {expected:.6f}; it is {found:.6f}.{cause}",
    )


def _check_once(here: str, result: Any, num_rows: int) -> None:
    check(
        result["rows"] == [num_rows] * STEPS,
        f"{here}: in each of {STEPS} steps loss_sum should be called once, with this rank's batch "
        f"of {num_rows} rows, even if there are none; the model was called with "
        f"{short(result['rows'])} rows.",
    )
    check(result["is_kept"], f"{here}: the batch should stay as it is, but it has been changed.")


def _check_updates(here: str, result: Any) -> None:
    check(
        result["updates"] == [STEPS, 2048.0] and not any(result["skipped"]),
        f"{here}: in {STEPS} steps without an overflow, the scaler should be updated {STEPS} "
        "times, its scale should grow from 1024 to 2048 with interval 2, and no step should be "
        f"reported as skipped; [updates, scale] is {result['updates']}, and skipped "
        f"{result['skipped']}.",
    )


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
    sizes = _uneven(grade, len(MEMBERS))
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.train_steps, sizes, STEPS, MAX_NORM),
        if_stuck=STUCK_IN_GROUP,
    )
    _check_all(of_members(run), sizes)


def _called_with(autocast: Sequence[tuple[bool, str]]) -> str:
    """Say of each call whether autocast was on, and for which dtype."""
    calls = [
        f"autocast to {dtype.removeprefix('torch.')}" if is_on else "autocast off"
        for is_on, dtype in autocast
    ]
    return f"it was called with {', then with '.join(calls)}" if calls else "it was not called"


@task("2.5")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_it_computes_in_16_bits_and_keeps_32(grade: Grade, dtype: str) -> None:
    found = grade.call(b.step_noted, dtype)
    check(
        found["autocast"] == [(True, f"torch.{dtype}")],
        f"with dtype {dtype}, loss_sum should be called once, under torch.autocast of the "
        f"parameters' device type and that dtype; {_called_with(found['autocast'])}.",
    )
    check(
        found["computed"] == [f"torch.{dtype}"],
        f"with dtype {dtype}, both linear layers should compute in {dtype}; they computed in "
        f"{' and '.join(found['computed'])}.",
    )
    check(
        found["kept"] == ["torch.float32"] and found["is_same"],
        "parameters and their gradients should stay in float32, and parameters should be the same "
        f"tensors as before; after the step they are in {' and '.join(found['kept'])}. autocast "
        "makes 16-bit copies of them by itself.",
    )
    check(
        found["updates"] == 1,
        f"with dtype {dtype}, the scaler should be updated once in a step, whatever the dtype; it "
        f"was updated {found['updates']} times.",
    )


@task("2.5")
def test_updates_that_16_bits_would_lose_add_up(grade: Grade) -> None:
    num_steps = grade.random.randint(8, 12)
    expected = 1 - num_steps * 2.0**-13
    for rank, found in enumerate(grade.run(b.small_updates, 2, num_steps).results):
        check(
            is_close(expected, found, 1e-7),
            f"rank {rank} of 2: a weight of 1.0 and {num_steps} updates of -0.000122 should make "
            f"{expected:.6f}; it is {found:.6f}. float16 has no number between 0.9995 and 1: the "
            "optimizer should update the parameters in float32.",
        )


@task("2.5")
@pytest.mark.parametrize("reduce_dtype", ["float16", "float32"])
def test_small_gradients_survive(grade: Grade, reduce_dtype: str) -> None:
    """Of 2**-26: float16 ends at 2**-24, so they must be scaled in backward and in the sum."""
    factors, rows = [2.0**-26, 3 * 2.0**-26], [3, 1]
    expected = -(2.0**20) * (3 * factors[0] + factors[1]) / 4
    run = grade.run(b.small_gradients, 2, factors, rows, 2.0**16, reduce_dtype)
    for rank, found in enumerate(run.results):
        check(
            is_close(expected, found["moved"], abs(expected) / 100) and not found["skipped"],
            f"rank {rank} of 2, reduce_dtype {reduce_dtype}: a gradient of "
            f"{-expected / 2**20:.3g} and lr 2**20 should move the weight by {expected:.4g}; it "
            f"moved by {found['moved']:.4g}. float16 has nothing between 0 and 6e-8, so gradients "
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
            check(
                step["state"] == by_rank[0][number]["state"],
                f"{here}: the parameters differ from those of rank 0.",
            )
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
    check(
        is_close(expected, step["loss"], 1e-5 * abs(expected)),
        f"{here}: the loss should be the mean over the targets of all ranks, {expected:.6g}, also "
        f"in a step that is skipped; it is {step['loss']:.6g}.",
    )


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
        *(inside_group, OUTER_WORLD_SIZE, b.sums_of, reduce_dtype), if_stuck=STUCK_IN_GROUP
    )
    for rank, calls in enumerate(of_members(run)):
        here = f"rank {rank} of {len(MEMBERS)}, reduce_dtype {reduce_dtype}"
        large = [call[:2] for call in calls if call[0] > 2]
        check(
            large == [[b.NOTED_TRAINABLE, reduce_dtype]],
            f"{here}: the gradients of all {b.NOTED_TRAINABLE} trainable parameters should travel "
            f"in one all-reduce in {reduce_dtype}; the calls with more than two numbers are "
            f"{large}. A parameter without a gradient counts as zero, a frozen one not at all.",
        )
        others = [call[:2] for call in calls if call[0] <= 2]
        check(
            others in ([[2, "float32"]], [[2, "float64"]]),
            f"{here}: besides the gradients, sum of losses and number of targets should go through "
            f"the all_reduce given, two numbers in one call, in float32 or float64; these calls "
            f"are {others}.",
        )
        check(
            all(call[2] for call in calls),
            f"{here}: all_reduce should be called with the group that the step was given.",
        )


@task("2.5")
def test_a_mixed_step_without_any_target_is_refused(grade: Grade) -> None:
    sizes = [2, 0, 1]
    results = grade.run(b.step_without_targets, 3, sizes, if_stuck=EVERY_CALL).results
    check_refused(results, "A step where no rank has a target")
    for rank, result in enumerate(results):
        check(
            not result["changed"],
            f"rank {rank} of 3: no rank has a target, but the parameters have still changed. Raise "
            "the error before the optimizer's step.",
        )
