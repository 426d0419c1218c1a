"""Judges tasks 2.1 and 2.2: micro-batches, and accumulated steps on one rank and on several."""

from typing import Any

import pytest

from distlab.grade import Grade, Run, check, check_cost, task
from distlab.util.text import counted, joined
from judging.checks import (
    MEASURED,
    check_collectives,
    check_peak,
    check_refused,
    check_silent,
    is_close,
    of_members,
    short,
)
from judging.expect import expect
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from judging.models import Deep, Worn, deep_batch, trainable
from phase2 import step_checks as c
from phase2 import steps as b

EVERY_ROW = (
    "Every row belongs to one micro-batch, also those of an incomplete last one; a batch without "
    "rows has none. Every tensor is split."
)


@task("2.1")
@pytest.mark.parametrize("count", [1, 4])
def test_micro_batches_are_consecutive_rows(grade: Grade, count: int) -> None:
    size, rows = grade.random.randint(3, 5), grade.random.randint(4, 7)
    for num_rows in (2 * size, 2 * size + 1, 3 * size - 1, size - 1, 0):
        _check_split(grade, num_rows, size, count)
    for row_size in (1, rows - 1, rows, 100 * rows):
        _check_split(grade, rows, row_size, count)


def _check_split(grade: Grade, rows: int, size: int, count: int) -> None:
    run = grade.run(b.split, 1, rows, size, count)
    check_silent(run, "split_micro_batches")
    (found,), batch = run.results, b.tensors_of(rows)[:count]
    here = f"a batch of {counted(count, 'tensor')} with {counted(rows, 'row')}, size {size}"
    outer, *inner = found["types"]
    check(
        outer == "list" and {*inner} <= {"tuple"},
        f"{here}: split_micro_batches should return a list of tuples; yours returned a {outer}"
        f"{' of ' * bool(inner)}{joined([f'{one}s' for one in inner])}.",
    )
    parts = [[tensor[i : i + size] for tensor in batch] for i in range(0, rows, size)]
    lengths = [[len(x) if isinstance(x, list) else x for x in part] for part in found["values"]]
    what = "the rows of each micro-batch, by tensor,"
    expect(f"{here}: {what}", lengths, [[len(x) for x in part] for part in parts], EVERY_ROW)
    for number, part in enumerate(parts):
        for i, tensor in enumerate(part):
            what = f"{here}: tensor {i} of micro-batch {number}"
            got, dtype, is_view = (
                found[name][number][i] for name in ("values", "dtypes", "are_views")
            )
            order = "Micro-batches are consecutive rows, in the same order in all tensors."
            expect(what, got, tensor.tolist(), order)
            expect(f"{what}: its dtype", dtype, str(tensor.dtype))
            check(
                is_view,
                f"{what} should be a view of the batch's tensor, but it has memory of its own. "
                "Slices copy nothing; indexing with a list, stack and contiguous may copy.",
            )


@task("2.1")
def test_micro_batches_need_a_size_and_equal_rows(grade: Grade) -> None:
    for size in (0, -grade.random.randint(1, 3)):
        refusal = grade.call(b.split_badly, [4, 4], size)
        check_refused([refusal], f"size = {size}", str(size))
    for rows in ([7, 6], [5, 5, 8], [0, 3]):
        refusal, numbers = grade.call(b.split_badly, rows, 2), map(str, sorted(set(rows)))
        check_refused([refusal], f"A batch of tensors with {rows} rows", *numbers)


STEPS_ALONE, STEPS = 3, 2  # numbers of steps on one rank, and on several ranks
TRAINABLE = sum(p.numel() for p in trainable(Worn()))
GONE = "Are gradients from before the step gone?"
ALONE = c.Contract(
    b.ACCUMULATE,
    with_zeros=False,
    of_length="Divide once, by the number of targets of the whole batch: either each loss before "
    "its backward pass, or the sum of all gradients.",
    of_end=GONE,
    of_unused="Nothing uses it: it gets no gradient, so that weight decay leaves it as it is.",
)
ON_RANKS = c.Contract(
    b.OVER_RANKS,
    with_zeros=True,
    of_length="Sum up over micro-batches and ranks, and divide once, by the number of targets of "
    "all ranks: either each loss before its backward pass, or the sum of all gradients.",
    of_end=GONE,
    of_unused="No rank uses it: it has a gradient of zeros, so that weight decay changes it.",
)
BY_COMMON_NORM = (
    "Scale by max_norm over the norm that the mean gradient of all ranks has, over all parameters "
    "together, and only if that norm is larger than max_norm."
)
UNEQUALLY_OFTEN = (
    "Ranks have different numbers of micro-batches, and rank 1 may have none: communicate after "
    "the last one, where every rank comes exactly once."
)
IN_ONE_BUCKET = "All gradients go into one flat bucket, which is summed after the last micro-batch."
SIZES = {"one": 1, "two": 2, "three": 3, "whole": 8, "larger": 11}  # a batch has 7 or 8 rows
# For measuring memory: the width of the model, the rows of the batch, and micro-batches by rank.
WIDTH, ROWS, COUNTS = 32, 2048, (1, 2, 4, 8)


# Task 2.1: accumulated steps on one rank


@task("2.1")
@pytest.mark.parametrize("size", SIZES)
def test_accumulated_steps_are_those_of_the_batch(grade: Grade, size: str) -> None:
    share = b.Share(grade.random.choice([7, 8]) if size != "whole" else 8, SIZES[size])
    run = grade.run(b.accumulate_steps, 1, share, STEPS_ALONE)
    c.check_steps(ALONE, run.results, (share,), STEPS_ALONE)


def _check_step(result: Any, alone: Any, here: str, cause: str) -> None:
    expect(f"{here}: the loss", result["loss"], alone["loss"], cause, 1e-6)
    check(
        is_close(alone["state"], result["state"], c.TOLERANCE),
        f"{here}: the weights differ from those of one process that steps with the sum of all "
        f"losses over the number of targets. {cause}",
    )


TWO_LOSSES = {
    "a loss of two parts, of a model with dropout": (
        b.Loss(),
        "Each micro-batch goes through the model once, in order, in the mode that the model is in: "
        "a second pass draws other masks. The first micro-batch has a loss, but no target: it "
        "counts in the sum of the losses, and "
        "weighs nothing in the number of targets. Take both from the loss_sum given.",
    ),
    "losses that are all 0": (
        b.Loss(0.0),
        "There are targets, so the step is taken, and the weights decay. The norm is 0, too: don't "
        "divide by it.",
    ),
}


@task("2.1")
@pytest.mark.parametrize("what", TWO_LOSSES)
def test_accumulation_of_two_losses(grade: Grade, what: str) -> None:
    _judge_two_losses(grade, b.ACCUMULATE, (b.Share(grade.random.randint(6, 9), 2),), what)


def _judge_two_losses(grade: Grade, function: str, shares: tuple[b.Share, ...], what: str) -> None:
    loss, cause = TWO_LOSSES[what]
    args = b.two_losses, len(shares), function, shares, loss
    for rank, result in enumerate(grade.run(*args, if_stuck=UNEQUALLY_OFTEN).results):
        here, share = f"{what}, {c.described(shares)}, rank {rank}", shares[rank]
        sizes = [min(share.size, share.rows - start) for start in share.starts()]
        expect(
            f"{here}: the calls of loss_sum, by whether each gets the model, and the rows of the 4 "
            "tensors of a micro-batch that it gets,",
            result["calls"],
            [(True, [size] * 4) for size in sizes],
        )
        _check_step(result, c.two_losses_alone(shares, loss), here, cause)


@task("2.1")
def test_accumulation_without_any_target_is_refused(grade: Grade) -> None:
    for rows in (0, 5):
        results = grade.run(b.step_on_nothing, 1, b.ACCUMULATE, [rows]).results
        c.check_nothing_steps(results, f"a batch of {rows} rows without any target")


@task("2.1")
def test_memory_is_that_of_one_micro_batch(grade: Grade) -> None:
    """Four independent ranks use 1, 2, 4 and 8 micro-batches."""
    args = b.ACCUMULATE, 1, WIDTH, ROWS, COUNTS
    check_peak(
        grade.run(b.accumulate_deep, 4, *args, options=MEASURED),
        _memory_of_one(grade),
        f"With {' / '.join(map(str, COUNTS))} micro-batches by rank, the activations should take "
        "1/K of those of the whole batch. Call backward for each micro-batch before the next "
        "forward pass: it frees the activations, unless the graph is retained.",
    )


def _memory_of_one(grade: Grade) -> list[float]:
    """Return the number of bytes that each rank may use.

    That is enough for a step on one micro-batch, for the whole batch, and for two sets of
    gradients: the sum so far, and a micro-batch's own before they are added to it.
    """
    plain: Run = grade.run(b.plain_deep, len(COUNTS), WIDTH, ROWS, COUNTS, options=MEASURED)
    return [peak + _bytes_beside(WIDTH, ROWS, 2) for peak in plain.peak_bytes]


def _bytes_beside(width: int, rows: int, num_gradients: int) -> int:
    """Return the bytes of a batch, ``num_gradients`` sets of gradients, and scalars (1 KiB)."""
    gradients = sum(parameter.nbytes for parameter in Deep(width).parameters())
    return num_gradients * gradients + sum(x.nbytes for x in deep_batch(rows)) + 1024


# Task 2.2: accumulated steps on several ranks


def _shares(grade: Grade, n: int) -> tuple[b.Share, ...]:
    """Draw each rank's rows and micro-batch size.

    Rank 0 has the most rows, and rank 1 has none if n is 3 or more.
    """
    rows = [grade.random.randint(6, 8), *(grade.random.randint(1, 5) for _ in range(n - 1))]
    sizes = [2, *(grade.random.randint(1, 3) for _ in range(n - 1))]
    pairs = zip(rows, sizes, strict=True)
    return tuple(b.Share(0 if r == 1 and n > 2 else x, y) for r, (x, y) in enumerate(pairs))


@task("2.2", real=True)
def test_ranks_accumulate_as_one_process(grade: Grade) -> None:
    for n in (1, 2, 4) if grade.is_simulated else (3,):
        _judge_ranks(grade, n)


def _judge_ranks(grade: Grade, n: int) -> None:
    shares = _shares(grade, n)
    run = grade.run(b.steps_over_ranks, n, shares, STEPS, if_stuck=UNEQUALLY_OFTEN)
    c.check_steps(ON_RANKS, run.results, shares, STEPS)
    c.check_same_on_all(c.described(shares), run.results, "losses")
    if grade.is_simulated:
        calls = run.collectives
        judge = check if min(calls) < STEPS else check_cost
        judge(
            all(STEPS <= count <= 3 * STEPS for count in calls),
            f"{STEPS} steps need one all-reduce each, and perhaps two more of one number; the "
            f"numbers of collectives by rank are {calls}. "
            f"{UNEQUALLY_OFTEN if len({*calls}) > 1 else IN_ONE_BUCKET}",
        )
        check_collectives(run, calls, IN_ONE_BUCKET)


@task("2.2")
def test_gradients_take_one_all_reduce_a_step(grade: Grade) -> None:
    shares = _shares(grade, len(MEMBERS))
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.steps_over_ranks, shares, STEPS),
        if_stuck=f"{UNEQUALLY_OFTEN} {STUCK_IN_GROUP}",
    )
    results = of_members(run)
    for rank, result in enumerate(results):
        sizes = result["sizes"]
        large = [size for size in sizes if size > 2]
        has_all = sum(sizes) >= STEPS * (TRAINABLE + 2) and result["is_group_given"]
        judge = check_cost if has_all else check
        judge(
            len(large) == STEPS
            and sum(sizes) == STEPS * (TRAINABLE + 2)
            and len(sizes) - len(large) <= 2 * STEPS
            and result["is_group_given"],
            f"{c.described(shares)}, rank {rank}: in {STEPS} steps, the all_reduce given should be "
            f"called {STEPS} times, with the group given and the {TRAINABLE} numbers of all "
            "gradients (trainable parameters only, shared ones once) in one flat bucket. Two more "
            "are the loss and the number of targets, in the bucket or in calls of their own. It "
            f"was called with {short(sizes)} numbers"
            f"{', and without the group' * (not result['is_group_given'])}.",
        )
    expect(
        "the numbers of collectives by rank of the group, all through the all_reduce given,",
        [run.collectives[member] for member in MEMBERS],
        [len(result["sizes"]) for result in results],
    )
    c.check_steps(ON_RANKS, results, shares, STEPS)


@task("2.2")
def test_clipping_is_by_the_norm_of_the_mean(grade: Grade) -> None:
    shares = _shares(grade, 3)
    for factor in (grade.random.uniform(0.05, 0.1), 1.02):
        max_norm = factor * c.norm_of_first(shares)
        run = grade.run(b.steps_over_ranks, 3, shares, STEPS, max_norm, if_stuck=UNEQUALLY_OFTEN)
        clipping = ON_RANKS._replace(of_length=BY_COMMON_NORM, of_end=f"{BY_COMMON_NORM} {GONE}")
        c.check_steps(clipping, run.results, shares, STEPS, max_norm)


@task("2.2")
@pytest.mark.parametrize("what", TWO_LOSSES)
def test_two_losses_are_accumulated_over_ranks(grade: Grade, what: str) -> None:
    shares = (b.Share(grade.random.randint(4, 6), 2), b.Share(3, 1), b.Share(1, 2))
    _judge_two_losses(grade, b.OVER_RANKS, shares, what)


@task("2.2")
def test_a_single_trainable_parameter_is_enough(grade: Grade) -> None:
    shares = (b.Share(grade.random.randint(3, 5), 2), b.Share(3, 2))
    results = grade.run(b.step_of_one_parameter, 2, b.OVER_RANKS, shares).results
    for rank, state in enumerate(results):
        check(
            is_close(c.one_parameter_alone(shares), state, c.TOLERANCE),
            f"{c.described(shares)}, rank {rank}, a model with one trainable parameter: after a "
            "step, the weights should be those of one process.",
        )


@task("2.2")
def test_ranks_without_any_target_refuse_together(grade: Grade) -> None:
    args = b.step_on_nothing, 3, b.OVER_RANKS, [0, 2, 4]
    results = grade.run(*args, if_stuck=UNEQUALLY_OFTEN).results
    c.check_nothing_steps(results, "a step where no rank has a target")


@task("2.2")
def test_an_error_of_the_all_reduce_is_passed_on(grade: Grade) -> None:
    c.check_error_passed_on(grade, b.OVER_RANKS)


@task("2.2")
@pytest.mark.parametrize("large", ["activations", "gradients"])
def test_memory_is_that_of_one_micro_batch_or_one_bucket(grade: Grade, large: str) -> None:
    """Each of four ranks has 1, 2, 4 or 8 micro-batches in each of two steps."""
    width, rows = (WIDTH, ROWS) if large == "activations" else (128, 8)
    with_bucket = _bytes_beside(width, rows, 3)
    args = b.OVER_RANKS, 2, width, rows, COUNTS
    check_peak(
        grade.run(b.accumulate_deep, 4, *args, options=MEASURED),
        _memory_of_one(grade) if large == "activations" else [with_bucket] * len(COUNTS),
        "That is parameters, gradients and batch, and either the activations of one micro-batch or "
        "one bucket as large as the gradients. Free the activations of each micro-batch by its "
        "backward, fill the bucket after the last, divide and clip it in place, and do not keep it "
        "for the next step. Build the bucket with one torch.cat, also if loss and number of "
        "targets ride in it, and copy its parts back into the gradients that exist with copy_: a "
        "second bucket, or new gradients beside the old ones, take as much again.",
    )
