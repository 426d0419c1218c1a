"""Judges task 1.11: a step on all ranks is that of one process on all their batches."""

from math import isclose
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted
from judging.checks import check_refused, is_close, of_members, same_loss, short
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase1 import reference
from phase1 import step as b
from phase1.models import Stepped

STEPS = 3
TRAINABLE = sum(parameter.requires_grad for parameter in Stepped().parameters())
AN_EMPTY_BATCH = "A rank whose batch is empty must make every call that the others make."
NOT_ON_EVERY_RANK = (
    "An error that only some ranks raise leaves the others waiting: decide by the number of "
    "targets of all ranks, which every rank knows after the all-reduce."
)


def _uneven(grade: Grade, n: int) -> list[int]:
    """Draw the number of samples of each rank: none on rank 1 of 3 or more, most on rank 0."""
    sizes = [grade.random.randint(5, 8), *(grade.random.randint(1, 4) for _ in range(n - 1))]
    return [0 if rank == 1 and n > 2 else size for rank, size in enumerate(sizes)]


@task("1.11", real=True)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_steps_are_those_of_one_process(grade: Grade, n: int) -> None:
    sizes = _uneven(grade, n)
    run = grade.run(
        *(b.train_steps, n, sizes, STEPS), if_stuck=AN_EMPTY_BATCH if 0 in sizes else ""
    )
    _check_steps(run.results, sizes)
    if grade.is_simulated:
        _check_calls(run, STEPS * (1 + TRAINABLE))


def _check_steps(by_rank: list[Any], sizes: list[int], length: int = 0) -> None:
    alone = reference.steps_alone(tuple(sizes), STEPS, length)
    cause = "Are gradients from before the step gone?"
    if len(sizes) > 1:
        cause = (
            "Does each target have weight 1/B in the gradient, even after average has divided by "
            "N? And are gradients from before the step gone?"
        )
    for rank, result in enumerate(by_rank):
        here = f"batches of {sizes}, rank {rank}"
        _check_first_loss(here, rank, result["losses"][0], sizes, length)
        check(
            is_close(alone["state"], result["state"])
            and same_loss(alone["losses"], result["losses"]),
            f"{here}: after {STEPS} steps the weights or the losses differ from those of one "
            f"process: the losses are {short(result['losses'])}, and should be "
            f"{short(alone['losses'])}. {cause}",
        )
        check(
            result["losses"] == by_rank[0]["losses"],
            f"{here}: the losses {result['losses']} are not exactly those of rank 0, "
            f"{by_rank[0]['losses']}. Compute them from the result of the all-reduce, which is the "
            "same on all ranks.",
        )
        _check_is_its_own(here, result, STEPS * sizes[rank])


def _check_first_loss(here: str, rank: int, got: float, sizes: list[int], length: int) -> None:
    expected = reference.steps_alone(tuple(sizes), STEPS, length)["losses"][0]
    means = reference.first_losses(tuple(sizes), length)
    known = [mean for mean in means if mean == mean]
    cause = ""
    if len(sizes) > 1 and same_loss(got, means[rank]):
        cause = " That is the mean of this rank's own batch."
    elif len(sizes) > 1 and same_loss(got, sum(known) / len(known)):
        cause = " That is the mean of the ranks' means, in which small batches count too much."
    check(
        same_loss(expected, got),
        f"{here}: one process that trains on all the batches has a first loss of {expected:.6f}; "
        f"train_step returned {got:.6f}. The loss is the mean over all targets of all ranks, "
        f"before the step.{cause}",
    )


def _check_is_its_own(here: str, result: Any, num_rows: int) -> None:
    """What the step did with its batch, and what it returned."""
    check(
        result["are_buffers_kept"],
        f"{here}: train_step should leave the model's buffers as the forward pass leaves them, but "
        "has changed them: ranks need to share only the loss, the number of targets and the "
        "gradients.",
    )
    check(
        not result["changed"],
        f"{here}: train_step has changed the {' and '.join(result['changed'])} of its batch. They "
        "belong to the caller, who may use them again: compute in tensors of your own.",
    )
    check(
        sum(result["rows"]) == num_rows,
        f"{here}: in {STEPS} steps the model should see the {num_rows} rows of this rank's "
        f"batches, each once; it was called with {short(result['rows'])} rows.",
    )
    check(
        not result["types"],
        f"{here}: train_step should return a float; it returned {' and '.join(result['types'])}.",
    )


def _check_calls(run: Run, expected: int) -> None:
    """A step makes one all-reduce of two numbers, one for each parameter, and nothing else."""
    sends = sum(event.kind == "send" for event in run.trace.events) if run.trace else 0
    check(
        run.collectives == [expected] * len(run.results) and not sends,
        f"{STEPS} steps need {expected} all-reduces on each rank: each step needs one for two "
        f"numbers, and one for each of {TRAINABLE} trainable parameters. Collective calls per "
        f"rank: {run.collectives}; other messages sent: {sends}.",
    )


@task("1.11")
def test_sequences_count_every_position(grade: Grade) -> None:
    sizes, length = _uneven(grade, 2), grade.random.randint(2, 5)
    _check_steps(grade.run(b.train_steps, 2, sizes, STEPS, length).results, sizes, length)


@task("1.11")
def test_a_step_uses_what_it_is_given(grade: Grade) -> None:
    gradient = grade.random.uniform(1, 2)
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.step_with_arguments, gradient),
        if_stuck=STUCK_IN_GROUP,
    )
    for rank, used in enumerate(of_members(run)):
        here = f"rank {rank} of {len(MEMBERS)}"
        check(
            len(used["average"]) == 1,
            f"{here}: train_step should call its argument average once in a step; average was "
            f"called {counted(len(used['average']), 'time')}.",
        )
        whats = ("the model", "the all_reduce", "the group")
        missing = [what for what, came in zip(whats, used["average"][0], strict=True) if not came]
        check(
            not missing,
            f"{here}: average should get the model, the all_reduce and the group that train_step "
            f"was given; it did not get {' and '.join(missing)}.",
        )
        check(
            used["sizes"] == [2],
            f"{here}: the loss and the number of targets should go through the argument "
            "all_reduce, two numbers in one call; all_reduce was called with tensors of "
            f"{used['sizes']} numbers.",
        )
        _check_moved(here, used["moved"], -0.5 * gradient)
    _check_nothing_besides(run)


def _check_moved(here: str, moved: dict[str, list[float]], by: float) -> None:
    """The factor N/B, here 1/3, may come before the average or after it."""
    for name, found in moved.items():
        check(
            any(is_close(found, [one] * len(found)) for one in (by, by / 3)),
            f"{here}: after average, the gradient of {name} is {by / -0.5:.4f}, so the optimizer "
            f"should change {name} by {by:.4f}; it changed by {short(found)}. The gradients that "
            "average leaves are those of the step: do not change them afterwards.",
        )


def _check_nothing_besides(run: Run) -> None:
    expected = [int(rank in MEMBERS) for rank in range(OUTER_WORLD_SIZE)]
    check(
        run.collectives == expected,
        "with an average that sends nothing, a step needs only the all-reduce of two numbers; "
        f"collective calls per rank should be {expected}, but are {run.collectives}.",
    )


@task("1.11")
def test_a_step_without_any_target_is_refused_on_every_rank(grade: Grade) -> None:
    results = grade.run(b.step_without_data, 3, if_stuck=NOT_ON_EVERY_RANK).results
    check_refused(results, "A step where no rank has a target")
    for rank, result in enumerate(results):
        check(
            not result["changed"],
            f"rank {rank} of 3: no rank has a target, but the parameters were changed anyway. "
            "Raise the error before the optimizer's step.",
        )


@task("1.11")
def test_targets_are_counted_exactly_in_bfloat16(grade: Grade) -> None:
    sizes = [4 * grade.random.randint(65, 124) + 3 for _ in range(2)]  # bfloat16 adds one to each
    wrong = [grade.random.randint(50, 120) for _ in sizes]
    expected = 64 * sum(wrong) / sum(sizes)
    for rank, got in enumerate(grade.run(b.step_in_bfloat16, 2, sizes, wrong).results):
        check(
            isclose(got, expected, rel_tol=1e-6),
            f"for a model in bfloat16 and {sizes} targets on 2 ranks, of which {wrong} have a loss "
            f"of 64 and the others a loss of 0, train_step should return {expected:.6f}, but on "
            f"rank {rank} it returned {got:.6f}. bfloat16 has 8 significant bits, so 303 becomes "
            "304. Count and add up in float32 or float64.",
        )


@task("1.11")
def test_steps_inside_a_group(grade: Grade) -> None:
    sizes = _uneven(grade, len(MEMBERS))
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.train_steps, sizes, STEPS, 0), if_stuck=AN_EMPTY_BATCH
    )
    _check_steps(of_members(run), sizes)
