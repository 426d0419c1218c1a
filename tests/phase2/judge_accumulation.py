"""Judges tasks 2.1 to 2.3: micro-batches, and steps in them on one rank and on several."""

from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted, joined
from judging.checks import (
    MEASURED,
    check_peak,
    check_refused,
    check_silent,
    is_close,
    of_members,
    same_loss,
    short,
)
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from judging.models import Deep, Worn, deep_batch, trainable
from phase2 import steps as b
from phase2 import steps_alone as reference
from phase2.step_checks import (
    TOLERANCE,
    Contract,
    check_error_passed_on,
    check_nothing_steps,
    check_same_on_all,
    check_steps,
    described,
    norm_of_first,
)
from phase2.steps import ACCUMULATE, OVER_RANKS, Loss, Share

EVERY_ROW = "Every row belongs to one micro-batch, also those of an incomplete last one."


@task("2.1")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_micro_batches_are_consecutive_rows(grade: Grade, count: int) -> None:
    size = grade.random.randint(3, 5)
    for rows in (2 * size, 2 * size + 1, 3 * size - 1, size - 1):
        _check_split(grade, rows, size, count)


@task("2.1")
def test_micro_batches_of_extreme_sizes(grade: Grade) -> None:
    rows = grade.random.randint(4, 7)
    for size in (1, rows - 1, rows, rows + 1, 100 * rows):
        _check_split(grade, rows, size, 2)
    _check_split(grade, 1, 1, 3)


@task("2.1")
def test_a_batch_without_rows_has_no_micro_batches(grade: Grade) -> None:
    for size in (1, 5):
        _check_split(grade, 0, size, 3)


def _check_split(grade: Grade, rows: int, size: int, count: int) -> None:
    run = grade.run(b.split, 1, rows, size, count)
    check_silent(run, "split_micro_batches")
    (found,), batch = run.results, b.tensors_of(rows)[:count]
    here = f"a batch of {counted(count, 'tensor')} with {counted(rows, 'row')}, size {size}"
    check(
        found["types"][0] == "list" and {*found["types"][1:]} <= {"tuple"},
        f"{here}: split_micro_batches should return a list of tuples; yours returned "
        f"{_types_in_words(found['types'])}.",
    )
    _check_sizes(here, found["values"], [min(size, rows - i) for i in range(0, rows, size)], count)
    parts = [[tensor[i : i + size] for tensor in batch] for i in range(0, rows, size)]
    for number, part in enumerate(parts):
        _check_part(here, number, found, [tensor.tolist() for tensor in part])
        dtypes = [str(tensor.dtype) for tensor in batch]
        check(
            found["dtypes"][number] == dtypes,
            f"{here}: the tensors of micro-batch {number} should have the dtypes {dtypes}; they "
            f"have {found['dtypes'][number]}.",
        )


def _types_in_words(types: list[str]) -> str:
    """Write ``a generator``, or with what is in it ``a list of lists and tuples``."""
    outer, *inner = types
    return " of ".join(filter(None, [f"a {outer}", joined([f"{one}s" for one in inner])]))


def _check_sizes(here: str, values: list[Any], expected: list[int], count: int) -> None:
    for number, part in enumerate(values):
        check(
            len(part) == count,
            f"{here}: micro-batch {number} should have {counted(count, 'tensor')}, as the batch "
            f"has; it has {len(part)}. Every tensor is split.",
        )
    sizes = [[len(tensor) for tensor in part] for part in values]
    rows = f" with {short(expected)} rows in every tensor" if expected else ""
    check(
        sizes == [[rows] * count for rows in expected],
        f"{here}: there should be {counted(len(expected), 'micro-batch', 'micro-batches')}{rows}; "
        f"the rows of yours are {short(sizes)}. "
        + (EVERY_ROW if expected else "A batch without rows has none."),
    )


def _check_part(here: str, number: int, found: Any, expected: list[Any]) -> None:
    for i, (wanted, got) in enumerate(zip(expected, found["values"][number], strict=True)):
        check(
            got == wanted,
            f"{here}: tensor {i} of micro-batch {number} should be {short(wanted)}; it is "
            f"{short(got)}. Micro-batches are consecutive rows, in the order of the batch and the "
            "same in all tensors.",
        )
        check(
            found["are_views"][number][i],
            f"{here}: tensor {i} of micro-batch {number} should be a view of the batch's tensor, "
            "but it has memory of its own. Slices copy nothing; indexing with a list, stack and "
            "contiguous may copy.",
        )


@task("2.1")
def test_micro_batches_need_a_size_and_equal_rows(grade: Grade) -> None:
    for size in (0, -grade.random.randint(1, 3)):
        run = grade.run(b.split_badly, 1, [4, 4], size)
        check_refused(run.results, f"size = {size}", str(size))
    for rows in ([7, 6], [5, 5, 8], [0, 3]):
        run = grade.run(b.split_badly, 1, rows, 2)
        numbers = [str(count) for count in sorted(set(rows))]
        check_refused(run.results, f"A batch of tensors with {rows} rows", *numbers)


STEPS_ALONE, STEPS = 3, 2  # one rank alone, several ranks
TRAINABLE = sum(p.numel() for p in trainable(Worn()))
GONE = "Are gradients from before the step gone?"
ALONE = Contract(
    ACCUMULATE,
    with_zeros=False,
    of_length="Divide the sum of all gradients once, by the number of targets that count.",
    of_end=GONE,
    of_unused="Nothing uses it: it gets no gradient, so that weight decay leaves it as it is.",
)
ON_RANKS = Contract(
    OVER_RANKS,
    with_zeros=True,
    of_length="Sum up over micro-batches and ranks, and divide once, by the number of targets of "
    "all ranks.",
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
WIDTH, ROWS, COUNTS = 32, 2048, (1, 2, 4, 8)  # the model whose memory is measured


# 2.2


@task("2.2")
@pytest.mark.parametrize("size", SIZES)
def test_accumulated_steps_are_those_of_the_batch(grade: Grade, size: str) -> None:
    share = Share(grade.random.choice([7, 8]) if size != "whole" else 8, SIZES[size])
    run = grade.run(b.accumulate_steps, 1, share, STEPS_ALONE)
    check_steps(ALONE, run.results, (share,), STEPS_ALONE)


@task("2.2")
def test_accumulation_with_dropout(grade: Grade) -> None:
    share, seed = Share(7, 2), grade.random.randrange(1000)
    _check_step(
        grade.call(b.accumulate_with_dropout, seed, share),
        reference.dropout_alone(seed, share),
        "a model with dropout",
        "Each micro-batch goes through the model once, in order, in the mode that the model is "
        "in: a second pass draws other masks.",
    )


def _check_step(result: Any, alone: Any, here: str, cause: str) -> None:
    check(
        is_close(alone["state"], result["state"], TOLERANCE)
        and same_loss(alone["loss"], result["loss"]),
        f"{here}: the weights differ from those of one process that steps with the sum of all "
        f"losses over the number of targets, or the loss does: it is {result['loss']:.6f} and "
        f"should be {alone['loss']:.6f}. {cause}",
    )


@task("2.2")
def test_accumulation_of_two_losses(grade: Grade) -> None:
    share = Share(grade.random.randint(6, 9), 2)
    result = grade.call(b.accumulate_two_losses, share, Loss())
    sizes = [min(2, share.rows - start) for start in share.starts()]
    check(
        result["calls"] == [(True, [size] * 4) for size in sizes],
        f"loss_sum should be called once for each of {len(sizes)} micro-batches, in order, with "
        "the model and all 4 tensors of the micro-batch. Whether it got the model, and the rows "
        f"of what it got: {short(result['calls'])}.",
    )
    _check_step(
        *(result, reference.two_losses_alone((share,), Loss()), "a loss of two parts"),
        "The first micro-batch has a loss, but no target: it counts in the sum of the losses, and "
        "weighs nothing in the number of targets. Take both from loss_sum.",
    )


@task("2.2")
def test_a_loss_of_zero_is_no_missing_target(grade: Grade) -> None:
    share = Share(grade.random.randint(6, 9), 2)
    result = grade.call(b.accumulate_two_losses, share, Loss(0.0))
    _check_step(
        *(result, reference.two_losses_alone((share,), Loss(0.0)), "losses that are all 0"),
        "There are targets, so the step is taken, and the weights decay.",
    )


@task("2.2")
def test_accumulation_without_any_target_is_refused(grade: Grade) -> None:
    for rows in (0, 5):
        results = grade.run(b.step_on_nothing, 1, ACCUMULATE, [rows]).results
        check_nothing_steps(results, f"a batch of {rows} rows without any target")


@task("2.2")
def test_memory_is_that_of_one_micro_batch(grade: Grade) -> None:
    """Each of four ranks by itself, in 1, 2, 4 and 8 micro-batches."""
    args = ACCUMULATE, 1, WIDTH, ROWS, COUNTS
    check_peak(
        grade.run(b.accumulate_deep, 4, *args, options=MEASURED),
        _memory_of_one(grade),
        f"With {' / '.join(map(str, COUNTS))} micro-batches by rank, the activations should take "
        "1/K of those of the whole batch. Call backward for each micro-batch before the next "
        "forward pass: it frees the activations, unless the graph is retained.",
    )


def _memory_of_one(grade: Grade) -> list[float]:
    """Bytes by rank: an ordinary step on one micro-batch, and the rest of the batch.

    Gradients twice more: those so far, and all of a micro-batch before they are added.
    """
    plain: Run = grade.run(b.plain_deep, len(COUNTS), WIDTH, ROWS, COUNTS, options=MEASURED)
    rest = 2 * _gradient_bytes(WIDTH) + _batch_bytes(ROWS) + 1024  # scalars
    return [peak + rest for peak in plain.peak_bytes]


def _gradient_bytes(width: int) -> int:
    return sum(parameter.nbytes for parameter in Deep(width).parameters())


def _batch_bytes(rows: int) -> int:
    return sum(tensor.nbytes for tensor in deep_batch(rows))


# 2.3


def _shares(grade: Grade, n: int) -> tuple[Share, ...]:
    """Draw rows and sizes: most micro-batches on rank 0, none on rank 1 of 3 or more."""
    rows = [grade.random.randint(6, 8), *(grade.random.randint(1, 5) for _ in range(n - 1))]
    sizes = [2, *(grade.random.randint(1, 3) for _ in range(n - 1))]
    pairs = zip(rows, sizes, strict=True)
    return tuple(Share(0 if r == 1 and n > 2 else x, y) for r, (x, y) in enumerate(pairs))


@task("2.3")
@pytest.mark.parametrize("n", [1, 2, 4, 5, 8])
def test_ranks_accumulate_as_one_process(grade: Grade, n: int) -> None:
    _judge_ranks(grade, n)


@task("2.3", real=True)
def test_three_ranks_accumulate_as_one_process(grade: Grade) -> None:
    _judge_ranks(grade, 3)


def _judge_ranks(grade: Grade, n: int) -> None:
    shares = _shares(grade, n)
    run = grade.run(b.steps_over_ranks, n, shares, STEPS, if_stuck=UNEQUALLY_OFTEN)
    check_steps(ON_RANKS, run.results, shares, STEPS)
    check_same_on_all(described(shares), run.results, "losses")
    if grade.is_simulated:
        _check_nothing_else(run)


def _check_nothing_else(run: Run) -> None:
    sends = sum(event.kind == "send" for event in run.trace.events) if run.trace else 0
    check(
        all(STEPS <= count <= 2 * STEPS for count in run.collectives) and not sends,
        f"{STEPS} steps need one all-reduce each, and perhaps another of two numbers; the numbers "
        f"of collectives by rank are {run.collectives}, and {sends} other messages were sent. "
        f"{UNEQUALLY_OFTEN if len({*run.collectives}) > 1 else IN_ONE_BUCKET}",
    )


@task("2.3")
def test_gradients_take_one_all_reduce_a_step(grade: Grade) -> None:
    shares = _shares(grade, len(MEMBERS))
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.steps_over_ranks, shares, STEPS),
        if_stuck=f"{UNEQUALLY_OFTEN} {STUCK_IN_GROUP}",
    )
    results = of_members(run)
    for rank, result in enumerate(results):
        _check_calls(f"{described(shares)}, rank {rank}", result)
    calls = [len(result["sizes"]) for result in results]
    check(
        [run.collectives[member] for member in MEMBERS] == calls,
        f"all communication should go through the all_reduce given, which was called {calls} "
        f"times by rank of the group; by rank of the world there were {run.collectives} "
        "collectives.",
    )
    check_steps(ON_RANKS, results, shares, STEPS)


def _check_calls(here: str, result: Any) -> None:
    sizes = result["sizes"]
    large = [size for size in sizes if size > 2]
    check(
        len(large) == STEPS
        and sum(sizes) == STEPS * (TRAINABLE + 2)
        and len(sizes) - len(large) <= STEPS,
        f"{here}: in {STEPS} steps, the all_reduce given should be called {STEPS} times with the "
        f"{TRAINABLE} numbers of all gradients (trainable parameters only, shared ones once) in "
        "one flat bucket. Two more are the loss and the number of targets, in the bucket or in a "
        f"call of their own. It was called with {short(sizes)} numbers.",
    )
    check(
        result["is_group_given"],
        f"{here}: all_reduce should get the group that the function was given.",
    )


@task("2.3")
def test_clipping_is_by_the_norm_of_the_mean(grade: Grade) -> None:
    shares = _shares(grade, 3)
    for factor in (grade.random.uniform(0.05, 0.1), 1.02):
        max_norm = factor * norm_of_first(shares)
        run = grade.run(b.steps_over_ranks, 3, shares, STEPS, max_norm, if_stuck=UNEQUALLY_OFTEN)
        clipping = ON_RANKS._replace(of_length=BY_COMMON_NORM, of_end=f"{BY_COMMON_NORM} {GONE}")
        check_steps(clipping, run.results, shares, STEPS, max_norm)


TWO_LOSSES = {
    "a loss of two parts": (
        Loss(),
        "Take the losses and the number of targets from the loss_sum given.",
    ),
    "losses that are all 0": (Loss(0.0), "The norm is 0, too: don't divide by it."),
}


@task("2.3")
@pytest.mark.parametrize("what", TWO_LOSSES)
def test_two_losses_are_accumulated_over_ranks(grade: Grade, what: str) -> None:
    loss, cause = TWO_LOSSES[what]
    shares = (Share(grade.random.randint(4, 6), 2), Share(3, 1), Share(1, 2))
    run = grade.run(b.two_losses_over_ranks, 3, shares, loss, if_stuck=UNEQUALLY_OFTEN)
    alone = reference.two_losses_alone(shares, loss)
    for rank, result in enumerate(run.results):
        _check_step(result, alone, f"{what}, {described(shares)}, rank {rank}", cause)


@task("2.3")
def test_ranks_without_any_target_refuse_together(grade: Grade) -> None:
    args = b.step_on_nothing, 3, OVER_RANKS, [0, 2, 4]
    results = grade.run(*args, if_stuck=UNEQUALLY_OFTEN).results
    check_nothing_steps(results, "a step where no rank has a target")


@task("2.3")
def test_an_error_of_the_all_reduce_is_passed_on(grade: Grade) -> None:
    check_error_passed_on(grade, OVER_RANKS)


@task("2.3")
@pytest.mark.parametrize("large", ["activations", "gradients"])
def test_memory_is_that_of_one_micro_batch_or_one_bucket(grade: Grade, large: str) -> None:
    """Each of four ranks has 1, 2, 4 or 8 micro-batches in each of two steps."""
    width, rows = (WIDTH, ROWS) if large == "activations" else (128, 8)
    with_bucket = 3 * _gradient_bytes(width) + _batch_bytes(rows) + 1024
    args = OVER_RANKS, 2, width, rows, COUNTS
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
