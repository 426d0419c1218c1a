"""Judges tasks 1.14 and 1.15: a step for which the host waits once, and batches copied ahead."""

from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.sim import GPU, Cluster, Options
from distlab.sim.hardware.costs import Costs
from distlab.util.text import counted
from judging.checks import check_collectives, is_close, short
from judging.expect import expect, expect_on_all_ranks, results_in_group
from judging.groups import MEMBERS
from phase1 import gpu as b
from phase1 import reference
from phase1.gpu import NAMES, Steps

AS_ON_GPUS = Options(semantics="nccl", p2p_order="free")
SPEED = {"float32": 1e9, "float64": 1e9}
# A kernel on this GPU takes longer than the host needs to launch it, whatever the size.
TOY = GPU("toy", 1e12, 1e8, SPEED, SPEED)
SLOW = Cluster(1, 4, latency_s=1e-6, nvlink_bytes_per_s=1e9, gpu=TOY)
SLOW_COPIES = Options(semantics="nccl", p2p_order="free", costs=Costs(copy_bytes_per_s=2e7))
ROUNDING = 1e-5  # torch's own clipping adds 1e-6 to the norm

# Task 1.14: train_step_ahead

ONE_READ = (
    "Keep every value in a tensor on the GPU, choose by torch.where and clamp instead of if, and "
    "read all numbers at once at the end."
)


def _sizes(grade: Grade, n: int) -> tuple[int, ...]:
    """Draw each rank's number of samples, without any on rank 1 if n is 3 or more."""
    sizes = [grade.random.randint(4, 7), *(grade.random.randint(1, 3) for _ in range(n - 1))]
    return tuple(0 if rank == 1 and n > 2 else size for rank, size in enumerate(sizes))


@task("1.14", real=True)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_steps_ahead_are_those_of_one_process(grade: Grade, n: int) -> None:
    for max_norm in (100.0, 0.05):  # larger and smaller than all norms
        steps = Steps(_sizes(grade, n), max_norm, momentum=0.9)
        _check_steps(grade.run(b.steps_ahead, n, steps).results, steps)


def _check_steps(by_rank: list[Any], steps: Steps) -> None:
    alone = reference.steps_ahead_alone(steps)
    for rank, result in enumerate(by_rank):
        here = f"batches of {[*steps.sizes]}, max_norm {steps.max_norm}, rank {rank}"
        _check_numbers(here, rank, result, alone, steps, range(1))
        expect(f"{here}: the types of results other than float", result["types"], [])
        check(
            is_close(alone["state"], result["state"], ROUNDING),
            f"{here}: after {steps.num_steps} steps the weights differ from those of one process. "
            f"{_why_other_weights(result, steps)}",
        )
        _check_numbers(here, rank, result, alone, steps, range(1, steps.num_steps))
        expect(
            f"{here}: the results, exactly as on rank 0,",
            [*map(str, result["numbers"])],
            [*map(str, by_rank[0]["numbers"])],
            "Compute them from the result of the all-reduce, which is the same on all ranks.",
        )
        expect(f"{here}: what the steps have changed of batches", result["changed"], [])
        rows = [steps.sizes[rank]] * steps.num_steps
        expect(f"{here}: the rows of each forward pass", result["rows"], rows)


def _check_numbers(
    here: str, rank: int, result: Any, alone: dict[str, Any], steps: Steps, which: range
) -> None:
    for step in which:
        found, right = result["numbers"][step], alone["numbers"][step]
        for name, number, wanted in zip(NAMES, found, right, strict=True):
            is_right = is_close(number, wanted, ROUNDING) or str(number) == str(wanted)
            cause = "" if is_right else _why_other_number(name, number, rank, step, steps)
            check(
                is_right,
                f"{here}, step {step}: {name} should be {wanted:.6g}, and is {number:.6g}. {cause}",
            )


def _why_other_number(name: str, found: float, rank: int, step: int, steps: Steps) -> str:
    of_rank = reference.own_numbers(steps, rank)
    if len(steps.sizes) > 1 and step == 0 and is_close(found, of_rank[name], ROUNDING):
        return "That is this rank's own: sum over all ranks, and divide by all targets."
    if name == "gradient_norm" and is_close(found, steps.max_norm, ROUNDING):
        return "That is the norm after clipping: return the norm before."
    if name == "gradient_norm":
        return (
            "It is the norm of the mean gradient over all targets of all ranks, of all trainable "
            "parameters together."
        )
    return "Sums and numbers of targets are added up over all ranks, and divided once."


def _why_other_weights(result: Any, steps: Steps) -> str:
    if any(value != value for values in result["state"].values() for value in values):
        return (
            "Some are NaN: a factor of 0 leaves NaN as it is, because NaN * 0 is NaN. Choose zeros "
            "by torch.where."
        )
    if steps.bad:
        return (
            "Where the norm is not finite, the optimizer gets zeros for all elements, and steps, "
            "on all ranks."
        )
    return (
        "The optimizer gets the mean gradient, which is scaled down to max_norm if its norm is "
        "larger, and is left as it is otherwise."
    )


@task("1.14")
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_gradient_that_is_not_finite_changes_nothing(
    grade: Grade, bad: float, momentum: float
) -> None:
    steps = Steps(_sizes(grade, 3), 0.5, momentum, bad)
    _check_steps(grade.run(b.steps_ahead, 3, steps).results, steps)


@task("1.14")
def test_a_gradient_of_zero_stays_zero(grade: Grade) -> None:
    by_rank = grade.run(b.step_at_the_optimum, 2, grade.random.randint(2, 4)).results
    cause = "A norm of zero is not larger than max_norm, and 0 * (max_norm / 0) is NaN."
    what = "every loss and every gradient is 0: loss, accuracy and norm"
    expect_on_all_ranks(what, [result["numbers"] for result in by_rank], [0.0, 1.0, 0.0], cause)
    what = "every gradient is 0: whether parameters have changed"
    expect_on_all_ranks(what, [result["changed"] for result in by_rank], False, cause)


@task("1.14")
def test_the_largest_norm_is_1_by_default(grade: Grade) -> None:
    x = grade.random.uniform(3, 9)
    norm, moved = x / 2**0.5, 0.5 / 2**0.5
    cause = (
        f"A gradient of norm {norm:.3f} that is scaled down to 1 moves them by 0.5 if lr is 0.5."
    )
    for rank, found in enumerate(grade.run(b.step_by_default, 2, x).results):
        expect(f"rank {rank} of 2: gradient_norm", found["norm"], norm, "", ROUNDING)
        what = f"rank {rank} of 2, no max_norm given: the weights after a step from zero"
        expect(what, found["weights"], [moved, -moved], cause, ROUNDING)


@task("1.14")
def test_without_any_target_nothing_changes(grade: Grade) -> None:
    by_rank = grade.run(b.step_without_targets, 2).results
    what = "no rank has a target: loss, accuracy and norm"
    expect_on_all_ranks(what, [result["numbers"] for result in by_rank], ["nan"] * 3)
    what = "no rank has a target: whether parameters have changed"
    expect_on_all_ranks(what, [result["changed"] for result in by_rank], False)


@task("1.14")
def test_a_step_takes_one_all_reduce_of_all_it_sums(grade: Grade) -> None:
    n, num_steps = 2, grade.random.randint(2, 3)
    run = grade.run(b.steps_of_small_model, n, [3] * n, num_steps)
    check_collectives(run, [num_steps] * n, f"{num_steps} steps, each with one all-reduce")
    most = num_steps * 4 * (b.NUM_ELEMENTS + len(NAMES))
    sent = [int(number) for number in run.bytes_sent]
    check(
        max(sent) <= most,
        f"{num_steps} steps of a model with {b.NUM_ELEMENTS} float32 parameters: each of {n} ranks "
        f"should send {most} bytes, the gradients and three numbers; sent were {sent}. Join them "
        "in the dtype of the parameters: torch.cat takes the widest.",
    )


@task("1.14")
def test_steps_ahead_inside_a_group(grade: Grade) -> None:
    steps = Steps(_sizes(grade, len(MEMBERS)), 0.5, 0.9, length=grade.random.randint(2, 4))
    _check_steps(results_in_group(grade, b.steps_ahead, steps), steps)


@task("1.14")
def test_the_host_waits_for_the_gpu_once_per_step(grade: Grade) -> None:
    num_steps = grade.random.randint(3, 5)
    run = grade.run(b.steps_of_small_model, 2, [4, 3], num_steps, options=AS_ON_GPUS)
    _check_waits(grade, run, num_steps, f"In {num_steps} steps", ONE_READ)
    _check_hazards(run, "")


def _check_waits(grade: Grade, run: Run, most: int, when: str, cause: str) -> None:
    """Check how often hosts wait at the submission's lines; the message names these lines."""
    places = [f"{place}: {count} in {why}" for (place, why), count in grade.gpus.syncs.items()]
    for rank, count in enumerate(run.host_syncs):
        check(
            count <= most,
            f"{when}, the host of rank {rank} should wait for its GPU {counted(most, 'time')} at "
            f"most; on simulated GPUs it waited {count} times ({'; '.join(places)}). {cause}",
        )


def _check_hazards(run: Run, cause: str) -> None:
    check(not run.hazards, f"on GPUs, this would be wrong: {'; '.join(run.hazards[:2])}. {cause}")


@task("1.14")
def test_the_host_reads_after_the_optimizers_step(grade: Grade) -> None:
    run = grade.run(b.steps_of_small_model, 2, [4, 3], 2, cluster=SLOW, options=AS_ON_GPUS)
    expect_on_all_ranks(
        "whether the GPU has already done all its work at the optimizer's steps",
        [result["is_idle"] for result in run.results],
        [False] * 2,
        "The host has waited for it before: read the numbers when the optimizer's step has been "
        f"launched, too. Waits: {short([place for place, _ in grade.gpus.syncs])}.",
    )


# Task 1.15: Prefetcher


@task("1.15", real=True)
@pytest.mark.parametrize("num_batches", [0, 1, 2, 5])
def test_batches_come_in_order_one_ahead(grade: Grade, num_batches: int) -> None:
    _check_batches(grade.run(b.prefetched, 1, num_batches), num_batches)
    if grade.is_simulated:
        _check_batches(grade.run(b.prefetched, 1, num_batches, options=AS_ON_GPUS), num_batches)


def _check_batches(run: Run, num_batches: int) -> None:
    for number, found in enumerate(run.results[0]):
        device = found["device"]
        here = f"{counted(num_batches, 'batch', 'batches')}, device {device}, iteration {number}"
        expect(
            f"{here}: the batches",
            found["batches"],
            b.batches_of(num_batches),
            "Every iteration yields all batches of the loader, in order, in the form they have, "
            "and ends after the last.",
        )
        expect(
            f"{here}: the devices of their tensors",
            found["devices"],
            [device] * bool(num_batches),
            "Tensors inside tuples, lists and dicts are copied, too: map_tensors finds them.",
        )
        _check_taken(here, found["taken"], num_batches, is_gpu=device == "cuda")


def _check_taken(here: str, taken: list[int], num_batches: int, *, is_gpu: bool) -> None:
    most = [min(k + 2, num_batches) for k in range(num_batches)]
    least = most if is_gpu else [k + 1 for k in range(num_batches)]
    check(
        all(low <= count <= high for low, count, high in zip(least, taken, most, strict=True)),
        f"{here}: when batch k is yielded, the loader should have been asked for batch k+1 and for "
        f"none after it, so {most} batches should have been taken; they were {taken}. One that is "
        "read earlier takes memory, and one that is read later is not copied ahead.",
    )


@task("1.15")
@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "pageable"])
def test_neither_the_host_nor_a_stream_is_in_the_way(grade: Grade, is_pinned: bool) -> None:
    num_batches = grade.random.randint(4, 6)
    run = grade.run(b.use_on_own_stream, 1, num_batches, is_pinned, options=AS_ON_GPUS)
    _check_hazards(
        run,
        "The stream that is the current one when the caller asks for a batch waits for its copy, "
        "and record_stream tells torch's allocator that it uses the memory.",
    )
    memory = "pinned" if is_pinned else "pageable"
    when = f"While {num_batches} batches in {memory} memory are handed out"
    _check_waits(
        grade,
        run,
        0,
        when,
        "A copy does not make the host wait if its source is pinned and non_blocking=True is "
        "given; streams wait for each other by events.",
    )
    means = [2 * number + 0.5 for number in range(num_batches)]
    expect("the sums of two means of each batch", run.results[0], means)


@task("1.15")
def test_a_copy_runs_while_the_batch_before_is_used(grade: Grade) -> None:
    num_batches = grade.random.randint(6, 9)
    run = grade.run(b.times_of_copies, 1, num_batches, cluster=SLOW, options=SLOW_COPIES)
    copy_s, use_s, loop_s = (run.results[0][name] for name in ("copy_s", "use_s", "loop_s"))
    most_s = 1.1 * (copy_s + num_batches * max(copy_s, use_s))
    check(
        loop_s <= most_s,
        f"{num_batches} batches, each copied in {1e3 * copy_s:.2f} ms and used in "
        f"{1e3 * use_s:.2f} ms, should take {1e3 * most_s:.1f} ms, as copies run beside the use of "
        f"the batch before; they took {1e3 * loop_s:.1f} ms. Is the copy on self.stream, and is it "
        "launched before the batch is yielded? The caller's stream should wait for the copy of its "
        "own batch only, not for the one after it.",
    )
