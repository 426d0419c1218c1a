"""Judges task 2.3: ranks that accumulate make one step, with one all-reduce."""

from collections.abc import Sequence
from math import hypot, inf
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from judging.checks import (
    MEASURED,
    check_peak,
    check_refused,
    is_close,
    of_members,
    same_loss,
    short,
)
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from judging.models import Deep, Worn, deep_batch
from phase2 import accumulation as b
from phase2 import accumulation_reference as reference
from phase2.accumulation_models import Share
from phase2.judge_accumulation import (
    COUNTS,
    ROWS,
    TOLERANCE,
    WIDTH,
    check_direction,
    check_end,
    check_use,
    memory_of_one,
    weighted,
)

STEPS = 2
FUNCTION = "accumulate_step_over_ranks"
TRAINABLE = sum(p.numel() for p in Worn().parameters() if p.requires_grad)
CLIPPED = 1e-5  # clip_grad_norm_ adds 1e-6 to the norm
UNEQUALLY_OFTEN = (
    "Ranks have different numbers of micro-batches, and rank 1 may have none: communicate after "
    "the last one, where every rank comes exactly once."
)
IN_ONE_BUCKET = "All gradients go into one flat bucket, which is summed after the last micro-batch."
ONCE = (
    "Sum up over micro-batches and ranks, and divide once, by the number of targets of all ranks."
)
BY_COMMON_NORM = (
    "Scale by max_norm over the norm that the mean gradient of all ranks has, over all parameters "
    "together, and only if that norm is larger than max_norm."
)


def _shares(grade: Grade, n: int) -> tuple[Share, ...]:
    """Draw rows and sizes: most micro-batches on rank 0, none on rank 1 of 3 or more."""
    rows = [grade.random.randint(6, 8), *(grade.random.randint(1, 5) for _ in range(n - 1))]
    sizes = [2, *(grade.random.randint(1, 3) for _ in range(n - 1))]
    pairs = zip(rows, sizes, strict=True)
    return tuple(Share(0 if r == 1 and n > 2 else x, y) for r, (x, y) in enumerate(pairs))


@task("2.3")
@pytest.mark.parametrize("n", [1, 2, 4, 5, 8])
def test_ranks_accumulate_as_one_process(grade: Grade, n: int) -> None:
    _check_run(grade, n)


@task("2.3", real=True)
def test_three_ranks_accumulate_as_one_process(grade: Grade) -> None:
    _check_run(grade, 3)


def _check_run(grade: Grade, n: int) -> None:
    shares = _shares(grade, n)
    run = grade.run(b.steps_over_ranks, n, shares, STEPS, {}, if_stuck=UNEQUALLY_OFTEN)
    _check_steps(run.results, shares)
    if grade.is_simulated:
        _check_nothing_besides(run)


def _check_steps(
    by_rank: list[Any], shares: tuple[Share, ...], max_norm: float = inf, length: float = 1.0
) -> None:
    """Check the steps of all ranks; ``length`` is what is left of the gradient after clipping."""
    alone = reference.steps_alone(shares, STEPS, with_zeros=True, max_norm=max_norm)
    clips = f", max_norm {max_norm:.4g}" if max_norm < inf else ""
    for rank, result in enumerate(by_rank):
        here = f"{_described(shares)}{clips}, rank {rank}"
        _check_first_loss(here, rank, result["losses"][0], shares)
        scale = length / sum(_targets(shares))
        causes = BY_COMMON_NORM if clips else ONCE
        check_direction(here, result, _directions(shares, rank), scale, causes)
        check_end(
            *(here, alone, result, CLIPPED if clips else TOLERANCE),
            f"{causes} Are gradients from before the step gone?",
            "No rank uses it: it has a gradient of zeros, so that weight decay changes it.",
        )
        check(
            result["losses"] == by_rank[0]["losses"],
            f"{here}: the losses {result['losses']} are not exactly those of rank 0, "
            f"{by_rank[0]['losses']}. Compute them from the result of the all-reduce.",
        )
        check_use(here, FUNCTION, result, shares[rank], STEPS)


def _described(shares: Sequence[Share]) -> str:
    return f"micro-batches by rank {[share.micro_batches for share in shares]}"


def _targets(shares: tuple[Share, ...]) -> list[int]:
    return [sum(count for *_, count in parts) for parts in reference.parts_of_step(shares)]


def _check_first_loss(here: str, rank: int, got: float, shares: tuple[Share, ...]) -> None:
    by_rank, targets = reference.parts_of_step(shares), _targets(shares)
    sums = [sum(loss for _, loss, _ in parts) for parts in by_rank]
    means = [total / count for total, count in zip(sums, targets, strict=True) if count]
    expected = sum(sums) / sum(targets)
    cause = ""
    if same_loss(sum(means) / len(means), got):
        cause = " That is the mean of the ranks' means, in which small batches weigh too much."
    elif same_loss(sums[rank] / max(1, targets[rank]), got):
        cause = " That is the mean of this rank's own batch."
    check(
        same_loss(expected, got),
        f"{here}: the mean loss per target of all batches, before the step, is {expected:.6f}; "
        f"the function returned {got:.6f}.{cause}",
    )


def _directions(shares: tuple[Share, ...], rank: int) -> dict[str, list[float]]:
    """The gradients that right and wrong steps have, up to a factor, by what they are."""
    by_rank, targets = reference.parts_of_step(shares), _targets(shares)
    sums = [weighted([(gradient, 1.0) for gradient, *_ in parts]) for parts in by_rank if parts]
    some = [count for count in targets if count]
    own = weighted([(gradient, 1.0) for gradient, *_ in by_rank[rank]])
    last = [(parts[-1][0], 1.0) for parts in by_rank if parts]
    by_target = [(total, 1 / count) for total, count in zip(sums, some, strict=True)]
    by_norm = [(total, 1 / hypot(*total)) for total in sums]
    return {
        "": weighted([(total, 1.0) for total in sums]),
        "that of the ranks' last micro-batches alone. Clear the gradients once, and communicate "
        "after the last micro-batch": weighted(last),
        "the mean of the ranks' means, in which targets of a rank with few of them weigh too "
        f"much. {ONCE}": weighted(by_target),
        "a sum of gradients of equal length: each rank has clipped its own, before the all-reduce. "
        f"{BY_COMMON_NORM}": weighted(by_norm),
        **({"that of this rank alone: all-reduce it": own} if own else {}),
    }


def _check_nothing_besides(run: Run) -> None:
    sends = sum(event.kind == "send" for event in run.trace.events) if run.trace else 0
    check(
        all(STEPS <= count <= 2 * STEPS for count in run.collectives) and not sends,
        f"{STEPS} steps need one all-reduce each, and perhaps another of two numbers; the numbers "
        f"of collectives by rank are {run.collectives}, and {sends} other messages were sent. "
        f"{UNEQUALLY_OFTEN if len({*run.collectives}) > 1 else IN_ONE_BUCKET}",
    )


@task("2.3")
def test_gradients_take_one_all_reduce_a_step(grade: Grade) -> None:
    shares = _shares(grade, 4)
    run = grade.run(b.calls_over_ranks, 4, shares, STEPS, if_stuck=UNEQUALLY_OFTEN)
    _check_calls(run.results, shares)
    calls = [len(result["sizes"]) for result in run.results]
    check(
        run.collectives == calls,
        f"all communication should go through the all_reduce given, which was called {calls} "
        f"times by rank; there were {run.collectives} collectives.",
    )


def _check_calls(by_rank: list[Any], shares: Sequence[Share]) -> None:
    for rank, result in enumerate(by_rank):
        here, sizes = f"{_described(shares)}, rank {rank}", result["sizes"]
        large = [size for size in sizes if size > 2]
        check(
            len(large) == STEPS
            and sum(sizes) == STEPS * (TRAINABLE + 2)
            and len(sizes) - len(large) <= STEPS,
            f"{here}: in {STEPS} steps, the all_reduce given should be called {STEPS} times with "
            f"the {TRAINABLE} numbers of all gradients (trainable parameters only, shared ones "
            "once) in one flat bucket. Two more are the loss and the number of targets, in the "
            f"bucket or in a call of their own. It was called with {short(sizes)} numbers.",
        )
        check(
            result["is_group_given"],
            f"{here}: all_reduce should get the group that the function was given.",
        )


@task("2.3")
def test_clipping_is_by_the_norm_of_the_mean(grade: Grade) -> None:
    shares = _shares(grade, 3)
    parts = [part for parts in reference.parts_of_step(shares) for part in parts]
    gradient = weighted([(part, 1 / sum(_targets(shares))) for part, *_ in parts])
    norm = hypot(*gradient)
    for factor in (grade.random.uniform(0.05, 0.1), 1.02):
        options = {"max_norm": factor * norm}
        run = grade.run(b.steps_over_ranks, 3, shares, STEPS, options, if_stuck=UNEQUALLY_OFTEN)
        _check_steps(run.results, shares, factor * norm, min(1.0, factor))


@task("2.3")
def test_accumulation_over_ranks_inside_a_group(grade: Grade) -> None:
    shares = _shares(grade, len(MEMBERS))
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.calls_over_ranks, shares, STEPS),
        if_stuck=STUCK_IN_GROUP,
    )
    _check_steps(of_members(run), shares)
    _check_calls(of_members(run), shares)


@task("2.3")
def test_two_losses_are_accumulated_over_ranks(grade: Grade) -> None:
    _check_two_losses(
        grade, 1.0, "Take the losses and the number of targets from the loss_sum given."
    )


@task("2.3")
def test_a_gradient_of_zero_is_left_as_it_is(grade: Grade) -> None:
    _check_two_losses(grade, 0.0, "All losses are 0, and so is the norm: don't divide by it.")


def _check_two_losses(grade: Grade, factor: float, cause: str) -> None:
    shares = (Share(grade.random.randint(4, 6), 2), Share(3, 1), Share(1, 2))
    run = grade.run(b.two_losses_over_ranks, 3, shares, factor, if_stuck=UNEQUALLY_OFTEN)
    alone = reference.two_losses_alone(Share(sum(share.rows for share in shares), 2), factor)
    for rank, result in enumerate(run.results):
        check(
            is_close(alone["state"], result["state"], TOLERANCE)
            and same_loss(alone["loss"], result["loss"]),
            f"a loss of two parts, {_described(shares)}, rank {rank}: the weights differ from "
            f"those of one process, or the loss does: it is {result['loss']:.6f} and should be "
            f"{alone['loss']:.6f}. {cause}",
        )


@task("2.3")
def test_ranks_without_any_target_refuse_together(grade: Grade) -> None:
    results = grade.run(b.nothing_over_ranks, 3, if_stuck=UNEQUALLY_OFTEN).results
    check_refused(results, "A step where no rank has a target")
    for rank, result in enumerate(results):
        check(
            not result["changed"],
            f"rank {rank} of 3: no rank has a target, but the parameters have changed. Raise the "
            "error before the optimizer's step.",
        )


@task("2.3")
@pytest.mark.parametrize("large", ["activations", "gradients"])
def test_memory_is_that_of_one_micro_batch_or_one_bucket(grade: Grade, large: str) -> None:
    """Each of four ranks has 1, 2, 4 or 8 micro-batches in each of two steps."""
    width, rows = (WIDTH, ROWS) if large == "activations" else (128, 8)
    run = grade.run(b.deep_over_ranks, 4, width, rows, COUNTS, options=MEASURED)
    gradients = sum(parameter.nbytes for parameter in Deep(width).parameters())
    with_bucket = 3 * gradients + sum(tensor.nbytes for tensor in deep_batch(rows)) + 1024
    check_peak(
        run,
        memory_of_one(grade, width, rows, COUNTS)
        if large == "activations"
        else [with_bucket] * len(COUNTS),
        "That is parameters, gradients and batch, and either the activations of one micro-batch or "
        "one bucket as large as the gradients. Free the activations of each micro-batch by its "
        "backward, fill the bucket after the last, divide and clip it in place, and do not keep it "
        "for the next step. Build the bucket with one torch.cat, also if loss and number of "
        "targets ride in it, and copy its parts back into the gradients that exist with copy_: a "
        "second bucket, or new gradients beside the old ones, take as much again.",
    )
