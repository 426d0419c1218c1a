"""Judges task 3.12: training in buckets is that of one process; what buckets hold, and when."""

from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.launch import LaunchError
from distlab.util.text import counted, joined
from judging.checks import check_waited, is_close, of_members, short, short_beside, uneven
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from judging.models import Odd
from phase3 import ddp as b
from phase3.buckets import Case, Param
from phase3.ddp import Limits, Plan
from phase3.judge_buckets import buckets_of

PARAMETERS = dict(Odd(1).named_parameters())
TRAINABLE = [name for name, parameter in PARAMETERS.items() if parameter.requires_grad]
NUM_BROADCASTS = len(PARAMETERS) + len([*Odd(1).buffers()]) + 1
SMALL = Limits(240, 60)
TOLERANCE = 1e-5  # one parameter is in float32
STUCK = (
    "All ranks should start the same all-reduces in the same order: that of the buckets, whichever "
    "is complete first, and also those that lack a gradient, in "
    "finish_gradient_synchronization."
)
CAUSES = {
    "mismatch": STUCK,
    "buffer changed": "A bucket travels from the start of its all-reduce until wait has returned, "
    "and nothing may write into it in between. Did it leave before its last gradient was added, "
    "did a backward pass inside of no_sync start it, or was it divided too early?",
}


def run_together(grade: Grade, body: Any, world_size: int, *args: object, **options: Any) -> Run:
    """Run a body; if ranks disagree or a bucket is overwritten, name the likely cause first."""
    try:
        return grade.run(body, world_size, *args, if_stuck=STUCK, **options)
    except LaunchError as error:
        headline = f"{error}".partition("\n")[0]
        cause = next((cause for words, cause in CAUSES.items() if words in headline), "")
        if cause:
            error.args = (f"{cause} Here: {error}", *error.args[1:])
        raise


# Training


def _plan(grade: Grade, n: int, optimizer: str, way: str = b.NOTED) -> Plan:
    """Draw the rows of each step; in the second, rank 1 has none, if there are three or more."""
    steps = [tuple(grade.random.randint(1, 4) for _ in range(n)) for _ in range(4)]
    if n > 2:
        steps[1] = (steps[1][0], 0, *steps[1][2:])
    return Plan(optimizer, Limits(grade.random.randint(100, 400), 60), tuple(steps), way)


@task("3.12")
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_training_equals_one_process(grade: Grade, n: int) -> None:
    plan = _plan(grade, n, "SGD" if n % 2 else "AdamW", b.BY_DEFAULT)
    run = run_together(grade, b.train, n, plan, options=uneven(grade.random, n))
    _check_training(plan, run.results)
    check_waited(run)


@task("3.12", real=True)
def test_training_of_three_ranks_equals_one_process(grade: Grade) -> None:
    plan = _plan(grade, 3, "AdamW")
    _check_training(plan, run_together(grade, b.train, 3, plan).results)


@task("3.12", real=True)
def test_a_blocking_all_reduce_in_a_thread(grade: Grade) -> None:
    plan = _plan(grade, 3, "SGD", b.IN_THREAD)
    run = run_together(grade, b.train, 3, plan)
    _check_training(plan, run.results)
    if grade.is_simulated:
        reduced = [len(calls) for calls in _collectives(run, "all_reduce")]
        check(
            not any(reduced),
            "the all_reduce given is the only way for gradients to travel; built-in all-reduces "
            f"by rank: {reduced}.",
        )


@task("3.12")
def test_training_inside_a_group(grade: Grade) -> None:
    plan = _plan(grade, len(MEMBERS), "SGD")
    run = grade.run(*(inside_group, OUTER_WORLD_SIZE, b.train, plan), if_stuck=STUCK_IN_GROUP)
    _check_training(plan, of_members(run), f", inside the group {list(MEMBERS)}")


def _check_training(plan: Plan, by_rank: Sequence[Any], where: str = "") -> None:
    """Check gradients, state, buckets and silence inside of no_sync, in every step."""
    for step, right in enumerate(b.train_alone(plan)):
        for rank, of_rank in enumerate(by_rank):
            result = of_rank["steps"][step]
            here = (
                f"{plan.how}, step {step}{where}, rows by rank {list(plan.rows[step])}, rank {rank}"
            )
            check(
                not result["inside"],
                f"{here}: a backward pass inside of no_sync should send nothing.",
            )
            for name, expected in right["gradients"].items():
                _check_gradient(f"{here}, {name}", name, expected, result, right["own"], rank, plan)
            _check_state(here, right["state"], result["state"], plan)
            for what in ("gradients", "state"):
                check(
                    result[what] == by_rank[0]["steps"][step][what],
                    f"{here}: gradients or parameters are not bit for bit those of rank 0.",
                )
            if plan.way == b.NOTED:
                _check_buckets(here, step, result, _expected(plan.limits, step, by_rank))


def _check_gradient(
    here: str,
    name: str,
    expected: Any,
    result: dict[str, Any],
    own: Sequence[Any],
    rank: int,
    plan: Plan,
) -> None:
    got, of_rank = result["gradients"][name], own[rank].get(name)
    check(
        is_close(expected, got, _tolerance_of(expected)),
        f"{here}: after finish_gradient_synchronization, the gradient of {name} should be "
        f"{short_beside(expected, got)}; it is {short_beside(got, expected)}. "
        f"{_why(name, expected, got, of_rank, len(own), plan)}",
    )


def _tolerance_of(expected: Any) -> float:
    """Return how far numbers may be from these, as rounding goes."""
    return TOLERANCE * max([1.0, *map(abs, expected or ())])


def _why(name: str, expected: Any, got: Any, own: Any, n: int, plan: Plan) -> str:
    if not PARAMETERS[name].requires_grad:
        return "It is frozen: leave it as it is."
    if got is None:
        return "A rank without a gradient takes part with zeros, and has the mean afterwards."
    tolerance = _tolerance_of(expected)
    if is_close([n * x for x in expected], got, n * tolerance):
        return "That is the sum over the ranks: divide it by their number."
    if n > 1 and any(own) and is_close(own, got, tolerance):
        return "That is this rank's own gradient, not the mean over the ranks."
    if any(expected) and is_close([x / n for x in expected], got, tolerance / n):
        return "It has been divided by the number of ranks twice."
    if plan.how != b.PLAIN:
        return (
            "It is the mean over the ranks of all that their backward passes have added up, inside "
            "of no_sync and outside. Where gradients exist, new buckets take them over."
        )
    if name == "tied.weight":
        return "Two layers share this weight: its gradient travels once, when it is complete."
    return (
        "Are gradients of an earlier step still in the bucket, has zero_grad set gradients to None "
        "and autograd then computed into other memory, or does the bucket travel before all of its "
        "gradients are there?"
    )


def _check_state(here: str, right: dict[str, Any], result: dict[str, Any], plan: Plan) -> None:
    for name, expected in right.items():
        check(
            is_close(expected, result[name], _tolerance_of(expected)),
            f"{here}: after {plan.optimizer}'s step, {name} should be as on one process with the "
            f"batches of all ranks, {short_beside(expected, result[name])}; it is "
            f"{short_beside(result[name], expected)}. Did all ranks begin with the parameters and "
            "buffers of rank 0?",
        )


@task("3.12")
def test_ranks_start_as_rank_0(grade: Grade) -> None:
    first = b.state_of(Odd(1))
    for rank, result in enumerate(grade.run(b.start, 3).results):
        here = f"rank {rank} of 3"
        for name, expected in first.items():
            kind = "parameter" if name in PARAMETERS else "buffer"
            check(
                result["state"][name] == expected,
                f"{here}: the {kind} {name} should be that of rank 0, {short(expected)}; "
                f"it is {short(result['state'][name])}. Frozen parameters and all buffers are "
                "part of the model, too.",
            )
        check(
            not result["replaced"] and result["trainable"] and result["is_module"],
            f"{here}: self.module should be the module given, with its parameters, and "
            f"what is trainable unchanged. Replaced: {result['replaced']}; the module is "
            f"{'the same' if result['is_module'] else 'another one'}; trainable as before: "
            f"{result['trainable']}.",
        )
        check(
            result["outputs"] == result["expected"],
            f"{here}: ddp(x, scale=3.0) should return what module(x, scale=3.0) returns, "
            f"{short(result['expected'])}; it returned {short(result['outputs'])}.",
        )
        check(
            result["keys"] == result["own_keys"] and result["loaded"] == result["saved"],
            f"{here}: state_dict and load_state_dict should be the module's, with its "
            f"names {short(result['own_keys'])}; the names are {short(result['keys'])}.",
        )


@task("3.12")
def test_a_rank_evaluates_alone(grade: Grade) -> None:
    run = grade.run(
        *(b.evaluate_alone, 3),
        if_stuck="Rank 0 calls the forward pass once more than the others, to evaluate. forward "
        "should send nothing: agree on the order of the buckets in "
        "finish_gradient_synchronization, where all ranks come.",
    )
    for rank, result in enumerate(run.results):
        check(
            not result["with_gradient"],
            f"rank {rank} of 3: under torch.no_grad, forward should leave gradients as they are, "
            f"None; afterwards, {joined(result['with_gradient'])} had one.",
        )


# no_sync


@task("3.12")
def test_no_sync_accumulates_without_a_message(grade: Grade) -> None:
    rows = ((6, 6), (6, 6))  # two steps: buckets have another order in the second
    for hows in (b.ACCUMULATIONS[:1], b.ACCUMULATIONS[1:]):
        plans = [Plan("SGD", SMALL, rows, how=how) for how in hows]
        run = run_together(grade, b.train_each, 2, plans)
        for place, plan in enumerate(plans):
            by_rank = [of_rank[place] for of_rank in run.results]
            for rank, result in enumerate(by_rank):
                _check_silence(f"{plan.how}, rank {rank} of 2", run, rank, plan, result["steps"])
            _check_training(plan, by_rank)


def _check_silence(here: str, run: Run, rank: int, plan: Plan, steps: Sequence[Any]) -> None:
    sent = [event for event in run.trace.events if event.rank == rank] if run.trace else []
    intervals = [interval for step in steps for interval in step["intervals"]]
    check(
        not any(begin < event.start_s < end for event in sent for begin, end in intervals),
        f"{here}: a backward pass inside of no_sync should send nothing.",
    )
    check(
        plan.how == b.INSIDE_ONLY or steps[-1]["before finish"],
        f"{here}: no bucket left during the backward pass, but only in "
        "finish_gradient_synchronization. no_sync should end with its block, also by an error, "
        "and a gradient that is added inside of it does not count as one that has come.",
    )


# Buckets


def _expected(limits: Limits, step: int, by_rank: Sequence[Any]) -> list[list[str]]:
    """Return the buckets of a step, by the order in which rank 0's first gradients came."""
    came = by_rank[0]["arrived"]
    order = [*came, *(name for name in reversed(TRAINABLE) if name not in came)]
    names = order[::-1] if step else TRAINABLE
    params = [
        Param(PARAMETERS[name].numel(), str(PARAMETERS[name].dtype).removeprefix("torch."))
        for name in names
    ]
    return [[names[i] for i in bucket] for bucket in buckets_of(Case(tuple(params), *limits))]


def _sizes(buckets: Sequence[Sequence[str]]) -> list[int]:
    return [sum(PARAMETERS[name].nbytes for name in bucket) for bucket in buckets]


@task("3.12")
def test_buckets_are_those_of_assign_buckets(grade: Grade) -> None:
    for limits in (Limits(grade.random.randint(150, 250), 60), Limits(2**20, 2**20), Limits(8, 8)):
        plan = Plan("SGD", limits, ((2, 2),) * 3)
        run = run_together(grade, b.train, 2, plan)
        _check_training(plan, run.results, f", {limits}")
        _check_nothing_besides(run)


def _check_buckets(here: str, step: int, result: dict[str, Any], expected: list[list[str]]) -> None:
    sizes = _sizes(expected)
    check(
        result["num_bytes"] == sizes,
        f"{here}: all_reduce should be started {counted(len(sizes), 'time')}, with buckets of "
        f"{sizes} bytes; it was started with {result['num_bytes']}. {_whose(step)} Trainable "
        "parameters only, a shared one once.",
    )
    check(
        result["has_group"],
        f"{here}: all_reduce should be given the group that the class was given.",
    )
    names = result["names"]
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
    check(
        not result["strays"],
        f"{here}: each gradient should be a view of the bucket that was reduced; "
        f"{joined(result['strays'])} lie elsewhere after the step.",
    )


def _whose(step: int) -> str:
    if step == 0:
        return "The first step has the buckets of assign_buckets for the trainable parameters."
    return (
        "After the first step, the buckets are those for the order in which rank 0's gradients "
        "came in it outside of no_sync, with those that did not come last."
    )


def _collectives(run: Run, name: str) -> list[list[Any]]:
    """Return the collectives of each rank whose name begins so, as they started."""
    events = sorted(run.trace.events, key=lambda event: event.start_s) if run.trace else []
    calls = [e for e in events if e.kind == "collective" and e.name.startswith(name)]
    return [[call for call in calls if call.rank == rank] for rank in range(len(run.results))]


def _check_nothing_besides(run: Run) -> None:
    calls = [sum(len(step["names"]) for step in result["steps"]) for result in run.results]
    reduced, sent = (
        [len(of_rank) for of_rank in _collectives(run, name)] for name in ("all_reduce", "broad")
    )
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
    plan = Plan("SGD", SMALL, ((2, 2),) * 2, b.BY_DEFAULT)
    run = run_together(grade, b.train, 2, plan)
    sizes = [n for step in (0, 1) for n in _sizes(_expected(SMALL, step, run.results))]
    for rank, calls in enumerate(_collectives(run, "all_reduce")):
        got = [call.num_bytes for call in calls]
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
    run = run_together(grade, b.in_different_orders, n, orders)
    _check_branches(orders, run.results, 1e-4)


@task("3.12")
def test_ranks_use_different_branches(grade: Grade) -> None:
    """Rank 0 alone uses branch 3, rank 2 alone branch 5, and no rank branch 4."""
    orders = [[0, 3, 1], [2, 1], [1, 5, 0], [1]]
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.2)):
        run = run_together(grade, b.in_different_orders, len(orders), orders, (), dtype)
        _check_branches(orders, run.results, tolerance, f" in {dtype}")


def _check_branches(
    orders: Sequence[Sequence[int]], by_rank: Sequence[Any], tolerance: float, where: str = ""
) -> None:
    n, num_branches = len(orders), max(map(max, orders)) + 1
    first = list(reversed(range(num_branches)))
    came = list(reversed(orders[0]))  # backward begins where forward ends
    later = [*came, *(branch for branch in first if branch not in came)]
    for rank, steps in enumerate(by_rank):
        for step, result in enumerate(steps):
            here = f"ranks use branches{where} in the orders {[*orders]}, step {step}, rank {rank}"
            for branch in range(num_branches):
                own = [(branch + 1) * (r + 1 + step) * (branch in orders[r]) for r in range(n)]
                got, mean = result["gradients"][branch], sum(own) / n
                check(
                    got is not None and abs(got - mean) <= tolerance,
                    f"{here}: the gradient of branch {branch} should be {mean:.4f}, the mean of "
                    f"{own}; it is {got}. A bucket that is complete early waits for those before "
                    "it: if ranks start them in different orders, gradients of different "
                    "parameters are added up.",
                )
            _check_order(here, later if step else first, result["calls"], is_first=not step)
            check(
                result["num_bytes"] == [24] * num_branches,
                f"{here}: each bucket should travel in its own dtype, as 24 bytes; they have "
                f"{result['num_bytes']}.",
            )


def _check_order(here: str, branches: Sequence[int], result: Any, *, is_first: bool) -> None:
    expected = [[f"weights.{branch}"] for branch in branches]
    check(
        result == expected,
        f"{here}: buckets should leave in the order {expected}, which is that of "
        f"{'assign_buckets' if is_first else 'rank 0, in the first step'}, on all ranks; they "
        f"left in the order {result}.",
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
