"""Judges task 2.2: a step in micro-batches is that of the whole batch, in less memory."""

from collections.abc import Mapping, Sequence
from math import hypot
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted, joined, sentence
from judging.checks import (
    MEASURED,
    check_peak,
    check_refused,
    is_close,
    same_loss,
    short,
    short_beside,
)
from judging.models import Deep, Worn, deep_batch, state_of
from phase2 import accumulation as b
from phase2 import accumulation_reference as reference
from phase2.accumulation_models import LENGTH, LR, WEIGHT_DECAY, Share

STEPS = 3
ONCE = "Divide the sum of all gradients once, by the number of targets that count."
TOLERANCE = 1e-12
SIZES = {"one": 1, "two": 2, "three": 3, "whole": 8, "larger": 11}  # of batches of 7 or 8 rows


@task("2.2")
@pytest.mark.parametrize("size", SIZES)
def test_accumulated_steps_are_those_of_the_batch(grade: Grade, size: str) -> None:
    share = Share(grade.random.choice([7, 8]) if size != "whole" else 8, SIZES[size])
    (result,) = grade.run(b.accumulate_steps, 1, share, STEPS).results
    here = f"{counted(share.rows, 'row')} in micro-batches of {share.size}"
    alone = reference.steps_alone((share,), STEPS)
    _check_first_loss(here, result["losses"][0], share)
    check_direction(here, result, directions(share), _scale(share), ONCE)
    check_end(
        *(here, alone, result, TOLERANCE, "Are gradients from before the step gone?"),
        "Nothing uses it: it gets no gradient, so that weight decay leaves it as it is.",
    )
    check_use(here, "accumulate_step", result, share, STEPS)


def _check_first_loss(here: str, got: float, share: Share) -> None:
    (parts,) = reference.parts_of_step((share,))
    total, targets = sum(loss for _, loss, _ in parts), sum(count for *_, count in parts)
    expected, last = total / targets, parts[-1]
    means = [loss / count for _, loss, count in parts if count]
    causes = {
        total: "the sum of the losses: divide it by the number of targets",
        last[1] / max(1, last[2]): "the loss of the last micro-batch alone",
        sum(means) / len(means): "the mean of the micro-batches' means, in which those with few "
        "targets count too much",
        total / (share.rows * LENGTH): "the mean over all targets, also those that do not count",
    }
    found = [f" That is {cause}." for loss, cause in causes.items() if same_loss(loss, got)]
    check(
        same_loss(expected, got),
        f"{here}: the mean loss per target of the batch, before the step, is {expected:.6f}; the "
        f"function returned {got:.6f}.{''.join(found[:1])}",
    )


def directions(share: Share) -> dict[str, list[float]]:
    """The gradients that right and wrong steps have, up to a factor, by what they are."""
    (parts,) = reference.parts_of_step((share,))
    some = [(gradient, count) for gradient, _, count in parts if count]
    return {
        "": weighted([(gradient, 1.0) for gradient, *_ in parts]),
        "the gradient of the last micro-batch alone. Gradients add up as long as nobody clears "
        "them: clear them once, before the first micro-batch": parts[-1][0],
        "the gradient of the first micro-batch alone": parts[0][0],
        "the mean of the micro-batches' means, in which the targets of a micro-batch with few of "
        "them weigh too much. Add up sums, and divide once, by all targets": weighted(
            [(gradient, 1 / count) for gradient, count in some]
        ),
    }


def weighted(parts: Sequence[tuple[list[float], float]]) -> list[float]:
    """Return the sum of gradients, each times a number."""
    return [sum(row) for row in zip(*([x * f for x in part] for part, f in parts), strict=True)]


def _scale(share: Share) -> float:
    return 1 / sum(count for *_, count in reference.parts_of_step((share,))[0])


def moved(result: Mapping[str, Any]) -> list[float]:
    """The gradient by which a result's first step has moved the parameters that are trainable."""
    model = Worn()
    before, after = state_of(model), result["states"][0]
    return [
        (x - y) / LR - WEIGHT_DECAY * x
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name != "unused"
        for x, y in zip(before[name], after[name], strict=True)
    ]


def check_direction(
    here: str, result: Any, known: Mapping[str, list[float]], scale: float, cause: str
) -> None:
    """Check the gradient of the first step: its direction, then its length.

    Args:
        here: names the case.
        result: of a step.
        known: gradients up to a factor, by what they are; "" is the right one.
        scale: what the right one is to be multiplied by.
        cause: of a wrong length.
    """
    found, right = moved(result), _without_unused(known[""])
    length, expected = hypot(*found), hypot(*right) * scale
    if _is_along(found, right):
        check(
            is_close(length / expected, 1.0, 1e-5),
            f"{here}: the direction of the first step is right, but its gradient is "
            f"{length / expected:.4g} times as long as it should be. {cause}",
        )
        return
    for name, gradient in known.items():
        check(
            not _is_along(found, _without_unused(gradient)),
            sentence(f"{here}: the gradient of the first step is {name}"),
        )


def check_end(
    here: str, alone: Any, result: Any, tolerance: float, cause: str, of_unused: str
) -> None:
    """Check losses and weights after the last step; ``of_unused`` tells of what nothing uses."""
    losses, state = result["losses"], result["states"][-1]
    check(
        same_loss(alone["losses"], losses),
        f"{here}: the losses of {len(losses)} steps should be those of one process on whole "
        f"batches, {short_beside(alone['losses'], losses)}; they are "
        f"{short_beside(losses, alone['losses'])}. {cause}",
    )
    wrong = [name for name in state if not is_close(alone["state"][name], state[name], tolerance)]
    check(
        not wrong,
        f"{here}: after {len(losses)} steps the losses are right, but {joined(wrong)} should have "
        f"other weights, those of one process. {of_unused if wrong == ['unused'] else cause}",
    )


def _without_unused(gradient: list[float]) -> list[float]:
    """Leave out the parameter that nothing uses: only weight decay moves it, or nothing does."""
    kept, start = list[float](), 0
    for name, parameter in Worn().named_parameters():
        if parameter.requires_grad:
            kept += gradient[start : start + parameter.numel()] if name != "unused" else []
            start += parameter.numel()
    return kept


def _is_along(a: Sequence[float], b: Sequence[float]) -> bool:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    lengths = hypot(*a) * hypot(*b)
    return lengths > 0 and dot / lengths > 1 - 1e-9


def check_use(here: str, function: str, result: Any, share: Share, num_steps: int) -> None:
    """Check what a function did with its batches, and what it returned."""
    starts = range(0, share.rows, share.size)
    passes = [min(share.size, share.rows - start) for start in starts] * num_steps
    check(
        [rows for rows in result["rows"] if rows] == passes,
        f"{here}: in {counted(num_steps, 'step')} the model should be called with {short(passes)} "
        f"rows, once for each micro-batch, {len(passes)} times in all; it was called "
        f"{len(result['rows'])} times, with {short(result['rows'])} rows.",
    )
    check(
        not result["changed"],
        f"{here}: {function} has changed the {' and '.join(result['changed'])} of its batch, "
        "which belong to the caller.",
    )
    check(
        not result["types"],
        f"{here}: {function} should return a float; it returned {' and '.join(result['types'])}.",
    )


@task("2.2")
def test_accumulation_with_dropout(grade: Grade) -> None:
    share, seed = Share(7, 2), grade.random.randrange(1000)
    (result,) = grade.run(b.accumulate_with_dropout, 1, seed, share).results
    _check_step(
        *(result, reference.dropout_alone(seed, share), "a model with dropout"),
        "Each micro-batch goes through the model once, in order, in the mode that the model is "
        "in: a second pass draws other masks.",
    )


def _check_step(result: Any, alone: Any, here: str, cause: str) -> None:
    check(
        is_close(alone["state"], result["state"], TOLERANCE)
        and same_loss(alone["loss"], result["loss"]),
        f"{here}: the weights differ from those of one step with the sum of all losses over the "
        f"number of targets, or the loss does: it is {result['loss']:.6f} and should be "
        f"{alone['loss']:.6f}. {cause}",
    )


@task("2.2")
def test_accumulation_of_two_losses(grade: Grade) -> None:
    share = Share(grade.random.randint(6, 9), 2)
    (result,) = grade.run(b.accumulate_two_losses, 1, share, 1.0).results
    sizes = [min(2, share.rows - start) for start in range(0, share.rows, 2)]
    check(
        result["calls"] == [(True, [size] * 4) for size in sizes],
        f"loss_sum should be called once for each of {len(sizes)} micro-batches, in order, with "
        "the model and all 4 tensors of the micro-batch. Whether it got the model, and the rows "
        f"of what it got: {short(result['calls'])}.",
    )
    _check_step(
        *(result, reference.two_losses_alone(share, 1.0), "a loss of two parts"),
        "The first micro-batch has a loss, but no target: it counts in the sum of the losses, and "
        "weighs nothing in the number of targets. Take both from loss_sum.",
    )


@task("2.2")
def test_a_loss_of_zero_is_no_missing_target(grade: Grade) -> None:
    share = Share(grade.random.randint(6, 9), 2)
    (result,) = grade.run(b.accumulate_two_losses, 1, share, 0.0).results
    _check_step(
        *(result, reference.two_losses_alone(share, 0.0), "losses that are all 0"),
        "There are targets, so the step is taken, and the weights decay.",
    )


@task("2.2")
def test_accumulation_without_any_target_is_refused(grade: Grade) -> None:
    for rows in (0, 5):
        results = grade.run(b.accumulate_nothing, 1, rows).results
        check_refused(results, f"A batch of {rows} rows without any target")
        check(
            not results[0]["changed"],
            f"a batch of {rows} rows without any target is refused, but the parameters have "
            "changed: raise the error before the optimizer's step.",
        )


WIDTH, ROWS, COUNTS = 32, 2048, (1, 2, 4, 8)


@task("2.2")
def test_memory_is_that_of_one_micro_batch(grade: Grade) -> None:
    """Each of four ranks by itself, in 1, 2, 4 and 8 micro-batches."""
    run = grade.run(b.accumulate_deep, 4, WIDTH, ROWS, COUNTS, options=MEASURED)
    check_peak(
        *(run, memory_of_one(grade, WIDTH, ROWS, COUNTS)),
        f"With {' / '.join(map(str, COUNTS))} micro-batches by rank, the activations should take "
        "1/K of those of the whole batch. Call backward for each micro-batch before the next "
        "forward pass: it frees the activations, unless the graph is retained.",
    )


def memory_of_one(grade: Grade, width: int, rows: int, counts: Sequence[int]) -> list[float]:
    """Bytes by rank: an ordinary step on one micro-batch, and the rest of the batch.

    Gradients twice more: those so far, and all of a micro-batch before they are added.
    """
    plain: Run = grade.run(b.plain_deep, len(counts), width, rows, counts, options=MEASURED)
    gradients = sum(parameter.nbytes for parameter in Deep(width).parameters())
    batch = sum(tensor.nbytes for tensor in deep_batch(rows))
    scalars = 1024
    return [peak + 2 * gradients + batch + scalars for peak in plain.peak_bytes]
