"""Judges task 3.12: what the buckets hold, and in which order they leave on all ranks."""

from collections.abc import Sequence
from typing import Any

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted, joined
from judging.checks import of_members, short
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase3 import ddp as b
from phase3.buckets import Case, Param
from phase3.ddp import Limits
from phase3.ddp_checks import PARAMETERS, TRAINABLE, collectives_named, run_together
from phase3.ddp_models import Odd
from phase3.judge_buckets import buckets_of

NUM_BROADCASTS = len(PARAMETERS) + len([*Odd(1).buffers()]) + 1
SMALL = Limits(240, 60)


def _expected_names(order: Sequence[str], limits: Limits) -> list[list[str]]:
    """The buckets of parameters in the order in which they are used."""
    params = [
        Param(PARAMETERS[name].numel(), str(PARAMETERS[name].dtype).removeprefix("torch."))
        for name in order
    ]
    return [[order[i] for i in bucket] for bucket in buckets_of(Case(tuple(params), *limits))]


@task("3.12")
def test_buckets_are_those_of_assign_buckets(grade: Grade) -> None:
    for limits in (Limits(grade.random.randint(150, 250), 60), Limits(2**20, 2**20), Limits(8, 8)):
        run = run_together(grade, b.buckets_of_steps, 2, limits, 3)
        _check_buckets(limits, run.results)
        _check_nothing_besides(run)


@task("3.12")
def test_buckets_inside_a_group(grade: Grade) -> None:
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.buckets_of_steps, SMALL, 2, False),
        if_stuck=STUCK_IN_GROUP,
    )
    _check_buckets(SMALL, of_members(run))


def _check_buckets(limits: Limits, by_rank: Sequence[Any]) -> None:
    came = by_rank[0]["arrived"]
    order = [*came, *(name for name in reversed(TRAINABLE) if name not in came)]
    for rank, found in enumerate(by_rank):
        for step, calls in enumerate(found["steps"]):
            used = TRAINABLE if step == 0 else order[::-1]
            here = f"{limits}, step {step}, rank {rank} of {len(by_rank)}"
            _check_step(here, step, calls, _expected_names(used, limits))
            check(
                not found["strays"][step],
                f"{here}: each gradient should be a view of the bucket that was reduced; "
                f"{joined(found['strays'][step])} lie elsewhere after the step.",
            )


def _check_step(here: str, step: int, calls: Sequence[Any], expected: list[list[str]]) -> None:
    sizes = [sum(PARAMETERS[name].nbytes for name in bucket) for bucket in expected]
    got = [call["num_bytes"] for call in calls]
    check(
        got == sizes,
        f"{here}: all_reduce should be started {counted(len(sizes), 'time')}, with buckets of "
        f"{sizes} bytes; it was started with {got}. {_whose(step)} Trainable parameters only, a "
        "shared one once.",
    )
    check(
        all(call["has_group"] for call in calls),
        f"{here}: all_reduce should be given the group that the class was given.",
    )
    names = [call["names"] for call in calls]
    check(
        all(names),
        f"{here}: gradients should be views of the buckets, so that nothing is copied; after "
        "finish_gradient_synchronization, the tensors that were reduced hold the gradients of "
        f"{short(names)}.",
    )
    check(
        [sorted(bucket) for bucket in names] == [sorted(bucket) for bucket in expected],
        f"{here}: the buckets should hold {expected}; they hold {names}. {_whose(step)}",
    )


def _whose(step: int) -> str:
    if step == 0:
        return "The first step has the buckets of assign_buckets for the trainable parameters."
    return (
        "After the first step, the buckets are those for the order in which rank 0's gradients "
        "came in it, with those that did not come last."
    )


def _check_nothing_besides(run: Run) -> None:
    calls = [sum(map(len, found["steps"])) for found in run.results]
    reduced, sent = collectives_named(run, "all_reduce"), collectives_named(run, "broadcast")
    check(
        reduced == calls,
        f"gradients should travel through the all_reduce given, which was called {calls} times by "
        f"rank; all-reduces by rank: {reduced}.",
    )
    others = [total - r - s for total, r, s in zip(run.collectives, reduced, sent, strict=True)]
    check(
        not any(others) and max(sent) <= NUM_BROADCASTS,
        f"besides the all-reduces, there should be {NUM_BROADCASTS - 1} broadcasts at the start, "
        "one for each parameter and buffer, and one of the order after the first step; broadcasts "
        f"by rank: {sent}, other collectives: {others}.",
    )


@task("3.12")
def test_by_default_torch_reduces(grade: Grade) -> None:
    run = run_together(grade, b.buckets_of_steps, 2, SMALL, 2, True)
    order = [*run.results[0]["arrived"]]
    order += [name for name in reversed(TRAINABLE) if name not in order]
    expected = [
        *_expected_names(TRAINABLE, SMALL),
        *_expected_names(order[::-1], SMALL),
    ]
    sizes = [sum(PARAMETERS[name].nbytes for name in bucket) for bucket in expected]
    events = run.trace.events if run.trace else []
    for rank in range(2):
        reduced = [
            e
            for e in events
            if e.rank == rank and e.kind == "collective" and e.name == "all_reduce"
        ]
        got = [e.num_bytes for e in sorted(reduced, key=lambda e: e.start_s)]
        check(
            sorted(got) == sorted(sizes),
            f"rank {rank} of 2, without an argument all_reduce: two steps should all-reduce "
            f"buckets of {sizes} bytes; they all-reduced {got}.",
        )


# Ranks that differ


@task("3.12", real=True)
def test_ranks_use_branches_in_different_orders(grade: Grade) -> None:
    n = 3
    orders = [grade.random.sample(range(4), 4) for _ in range(n)]
    orders[1] = orders[0][::-1]
    _check_branches(orders, run_together(grade, b.in_different_orders, n, orders).results)


@task("3.12")
def test_ranks_use_different_branches(grade: Grade) -> None:
    """Rank 0 alone uses branch 3, rank 2 alone branch 5, and nobody branch 4."""
    orders = [[0, 3, 1], [2, 1], [1, 5, 0], [1]]
    run = run_together(grade, b.in_different_orders, len(orders), orders)
    _check_branches(orders, run.results)


def _check_branches(orders: Sequence[Sequence[int]], by_rank: Sequence[Any]) -> None:
    n, num_branches = len(orders), max(map(max, orders)) + 1
    first = list(reversed(range(num_branches)))
    came = list(reversed(orders[0]))  # backward begins where forward ends
    later = [*came, *(branch for branch in first if branch not in came)]
    for rank, steps in enumerate(by_rank):
        for step, found in enumerate(steps):
            here = f"ranks use branches in the orders {[*orders]}, step {step}, rank {rank}"
            for branch in range(num_branches):
                own = [(branch + 1) * (r + 1 + step) * (branch in orders[r]) for r in range(n)]
                got, mean = found["gradients"][branch], sum(own) / n
                check(
                    got is not None and abs(got - mean) < 1e-4,
                    f"{here}: the gradient of branch {branch} should be {mean:.4f}, the mean of "
                    f"{own}; it is {got}. A bucket that is complete early waits for those before "
                    "it: if ranks start them in different orders, gradients of different "
                    "parameters are added up.",
                )
            _check_order(here, later if step else first, found["calls"], is_first=not step)


def _check_order(here: str, branches: Sequence[int], found: Any, *, is_first: bool) -> None:
    expected = [[f"weights.{branch}"] for branch in branches]
    check(
        found == expected,
        f"{here}: buckets should leave in the order {expected}, which is that of "
        f"{'assign_buckets' if is_first else 'rank 0, in the first step'}, on all ranks; they "
        f"left in the order {found}.",
    )


@task("3.12")
def test_no_sync_does_not_count_for_the_order(grade: Grade) -> None:
    order = grade.random.sample(range(4), 4)
    for inside in (order[::-1], order[1:] + order[:1]):
        run = run_together(grade, b.in_different_orders, 2, [order, order], inside)
        for rank, steps in enumerate(run.results):
            here = (
                f"backward passes use branches in the order {inside} inside of no_sync, which does "
                f"not count, and {order} outside, step 1, rank {rank} of 2"
            )
            _check_order(here, order[::-1], steps[1]["calls"], is_first=False)
