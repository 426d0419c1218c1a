"""Judges task 3.12: training in buckets is the training of one process."""

from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.util.text import joined
from judging.checks import check_waited, is_close, of_members, short, short_beside, uneven
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase3 import ddp as b
from phase3 import ddp_reference as reference
from phase3.ddp import Limits, Plan
from phase3.ddp_checks import PARAMETERS, collectives_named, run_together, tolerance_of
from phase3.ddp_models import Odd

SMALL = Limits(240, 60)


def _plan(grade: Grade, n: int, optimizer: str) -> Plan:
    """Draw the rows of each step; in the second, rank 1 has none, if there are three or more."""
    steps = [tuple(grade.random.randint(1, 4) for _ in range(n)) for _ in range(4)]
    if n > 2:
        steps[1] = (steps[1][0], 0, *steps[1][2:])
    return Plan(optimizer, Limits(grade.random.randint(100, 400), 60), tuple(steps))


@task("3.12")
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_training_equals_one_process(grade: Grade, n: int) -> None:
    plan = _plan(grade, n, "SGD" if n % 2 else "Adam")
    run = run_together(grade, b.train, n, plan, options=uneven(grade.random, n))
    _check_training(plan, run.results)
    check_waited(run)


@task("3.12", real=True)
def test_training_of_three_ranks_equals_one_process(grade: Grade) -> None:
    plan = _plan(grade, 3, "Adam")
    _check_training(plan, run_together(grade, b.train, 3, plan).results)


@task("3.12", real=True)
def test_a_blocking_all_reduce_in_a_thread(grade: Grade) -> None:
    plan = _plan(grade, 3, "SGD")
    run = run_together(grade, b.train, 3, plan, True)
    _check_training(plan, run.results)
    if grade.is_simulated:
        reduced = collectives_named(run, "all_reduce")
        check(
            not any(reduced),
            "the all_reduce given is the only way for gradients to travel; built-in all-reduces "
            f"by rank: {reduced}.",
        )


@task("3.12")
def test_training_inside_a_group(grade: Grade) -> None:
    plan = _plan(grade, len(MEMBERS), "SGD")
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.train, plan, False), if_stuck=STUCK_IN_GROUP
    )
    _check_training(plan, of_members(run), f", inside the group {list(MEMBERS)}")


def _check_training(plan: Plan, by_rank: Sequence[Any], where: str = "") -> None:
    alone = reference.train_alone(plan)
    for step, right in enumerate(alone):
        own = reference.gradients_by_rank(plan, step, alone)
        for rank, found in enumerate(by_rank):
            here = f"step {step}{where}, rows by rank {list(plan.rows[step])}, rank {rank}"
            _check_gradients(here, right["gradients"], found[step]["gradients"], own, rank)
            _check_state(here, right["state"], found[step]["state"], plan)
            check(
                found[step] == by_rank[0][step],
                f"{here}: gradients or parameters are not bit for bit those of rank 0.",
            )


def _check_gradients(
    here: str, right: dict[str, Any], found: dict[str, Any], own: Sequence[Any], rank: int
) -> None:
    for name, expected in right.items():
        got = found[name]
        check(
            is_close(expected, got, tolerance_of(expected)),
            f"{here}: after finish_gradient_synchronization, the gradient of {name} should be "
            f"{short_beside(expected, got)}; it is {short_beside(got, expected)}. "
            f"{_why(name, expected, got, own, rank)}",
        )


def _why(name: str, expected: Any, got: Any, own: Sequence[Any], rank: int) -> str:
    if not PARAMETERS[name].requires_grad:
        return "It is frozen: leave it as it is."
    if got is None:
        return "A rank without a gradient takes part with zeros, and has the mean afterwards."
    n, tolerance = len(own), tolerance_of(expected)
    if is_close([n * x for x in expected], got, n * tolerance):
        return "That is the sum over the ranks: divide it by their number."
    if n > 1 and own[rank][name] and is_close(own[rank][name], got, tolerance):
        return "That is this rank's own gradient, not the mean over the ranks."
    if any(expected) and is_close([x / n for x in expected], got, tolerance / n):
        return "It has been divided by the number of ranks twice."
    if name == "tied.weight":
        return "Two layers share this weight: its gradient travels once, when it is complete."
    return (
        "Are gradients of an earlier step still in the bucket, has zero_grad set gradients to None "
        "and autograd then computed into other memory, or does the bucket travel before all of its "
        "gradients are there?"
    )


def _check_state(here: str, right: dict[str, Any], found: dict[str, Any], plan: Plan) -> None:
    for name, expected in right.items():
        check(
            is_close(expected, found[name], tolerance_of(expected)),
            f"{here}: after {plan.optimizer}'s step, {name} should be as on one process with the "
            f"batches of all ranks, {short_beside(expected, found[name])}; it is "
            f"{short_beside(found[name], expected)}. Did all ranks begin with the parameters and "
            "buffers of rank 0?",
        )


@task("3.12")
def test_ranks_start_as_rank_0(grade: Grade) -> None:
    results = grade.run(b.start, 3).results
    first = b.state_of(Odd(1))
    for rank, found in enumerate(results):
        for name, expected in first.items():
            kind = "parameter" if name in PARAMETERS else "buffer"
            check(
                found["state"][name] == expected,
                f"rank {rank} of 3: the {kind} {name} should be that of rank 0, {short(expected)}; "
                f"it is {short(found['state'][name])}. Frozen parameters and all buffers belong to "
                "the model, too.",
            )
        check(
            not found["replaced"] and found["trainable"] and found["is_module"],
            f"rank {rank} of 3: self.module should be the module given, with its parameters, and "
            f"what is trainable unchanged. Replaced: {found['replaced']}; the module is "
            f"{'the same' if found['is_module'] else 'another one'}; trainable as before: "
            f"{found['trainable']}.",
        )
        check(
            found["outputs"] == found["expected"],
            f"rank {rank} of 3: ddp(x, scale=3.0) should return what module(x, scale=3.0) returns, "
            f"{short(found['expected'])}; it returned {short(found['outputs'])}.",
        )
        check(
            found["keys"] == found["own_keys"] and found["loaded"] == found["saved"],
            f"rank {rank} of 3: state_dict and load_state_dict should be the module's, with its "
            f"names {short(found['own_keys'])}; the names are {short(found['keys'])}.",
        )


@task("3.12")
def test_a_rank_evaluates_alone(grade: Grade) -> None:
    run = grade.run(
        *(b.evaluate_alone, 3),
        if_stuck="Rank 0 calls the forward pass once more than the others, to evaluate. forward "
        "should send nothing: agree on the order of the buckets in "
        "finish_gradient_synchronization, where all ranks come.",
    )
    for rank, found in enumerate(run.results):
        check(
            not found["with_gradient"],
            f"rank {rank} of 3: under torch.no_grad, forward should leave gradients as they are, "
            f"None; afterwards, {joined(found['with_gradient'])} had one.",
        )


# no_sync


@task("3.12")
def test_no_sync_accumulates_without_a_message(grade: Grade) -> None:
    n = 2
    for kinds in (b.ACCUMULATIONS[:1], b.ACCUMULATIONS[1:]):
        run = run_together(grade, b.accumulate, n, SMALL, kinds)
        for rank, by_kind in enumerate(run.results):
            for kind, found in zip(kinds, by_kind, strict=True):
                here = f"{kind}, rank {rank} of {n}"
                check(
                    not found["calls_inside"] and not _sent_within(run, rank, found["intervals"]),
                    f"{here}: a backward pass inside of no_sync should send nothing.",
                )
                _check_accumulation(here, kind, found, n)


def _sent_within(run: Run, rank: int, intervals: Sequence[tuple[float, float]]) -> int:
    events = run.trace.events if run.trace else []
    sent = [e for e in events if e.rank == rank and e.kind in ("collective", "send", "recv")]
    return sum(begin < event.start_s < end for event in sent for begin, end in intervals)


def _check_accumulation(here: str, kind: str, found: Any, n: int) -> None:
    for turn, right in enumerate(reference.accumulated(kind, n)):
        for name, expected in right.items():
            got = found["gradients"][turn][name]
            check(
                is_close(expected, got, tolerance_of(expected)),
                f"{here}, step {turn}: the gradient of {name} should be "
                f"{short_beside(expected, got)}; it is {short_beside(got, expected)}. It is the "
                "mean over the ranks of all that their backward passes have added up, inside of "
                "no_sync and outside. Where gradients exist, new buckets take them over.",
            )
    is_silent = kind == b.INSIDE_ONLY
    check(
        is_silent or found["before_finish"],
        f"{here}: no bucket left during the backward pass, but only in "
        "finish_gradient_synchronization. no_sync should end with its block, also by an error, "
        "and a gradient that is added inside of it does not count as one that has come.",
    )
