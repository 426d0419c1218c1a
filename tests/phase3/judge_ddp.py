"""Judges task 3.12: buckets of gradients that travel during the backward pass."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.launch import LaunchError
from distlab.words import counted, joined
from judging.checks import (
    MEASURED,
    UNIFORM,
    check_peak,
    check_waited,
    is_close,
    of_members,
    short,
    short_beside,
    uneven,
)
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase3 import ddp as b
from phase3 import ddp_reference as reference
from phase3.buckets import Case, Param
from phase3.ddp import Limits, Plan
from phase3.ddp_models import Layer, Odd
from phase3.judge_buckets import buckets_of

PARAMETERS = dict(Odd(1).named_parameters())
TRAINABLE = [name for name, parameter in PARAMETERS.items() if parameter.requires_grad]
NUM_BROADCASTS = len(PARAMETERS) + len([*Odd(1).buffers()]) + 1
SMALL = Limits(240, 60)
SINGLE_TOLERANCE = 1e-4  # one parameter is in float32
RIGHT_TIMES = 1.05
CLOCK_S = 15e-6  # what reading the clock of the simulated world takes, all in all
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


def _run(grade: Grade, body: Any, world_size: int, *args: object, **options: Any) -> Run:
    """Run a body; if ranks disagree or a bucket is overwritten, name the likely cause first."""
    try:
        return grade.run(body, world_size, *args, if_stuck=STUCK, **options)
    except LaunchError as error:
        headline = f"{error}".partition("\n")[0]
        cause = next((cause for words, cause in CAUSES.items() if words in headline), "")
        if cause:
            error.args = (f"{cause} Here: {error}", *error.args[1:])
        raise


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
    run = _run(grade, b.train, n, plan, options=uneven(grade.random, n))
    _check_training(plan, run.results)
    check_waited(run)


@task("3.12", real=True)
def test_training_of_three_ranks_equals_one_process(grade: Grade) -> None:
    plan = _plan(grade, 3, "Adam")
    _check_training(plan, _run(grade, b.train, 3, plan).results)


@task("3.12", real=True)
def test_a_blocking_all_reduce_in_a_thread(grade: Grade) -> None:
    plan = _plan(grade, 3, "SGD")
    run = _run(grade, b.train, 3, plan, True)
    _check_training(plan, run.results)
    if grade.is_simulated:
        reduced = _named(run, "all_reduce")
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
            is_close(expected, got, _tolerance(expected)),
            f"{here}: after finish_gradient_synchronization, the gradient of {name} should be "
            f"{short_beside(expected, got)}; it is {short_beside(got, expected)}. "
            f"{_why(name, expected, got, own, rank)}",
        )


def _tolerance(expected: Any) -> float:
    return SINGLE_TOLERANCE * max([1.0, *map(abs, expected or ())])


def _why(name: str, expected: Any, got: Any, own: Sequence[Any], rank: int) -> str:
    if not PARAMETERS[name].requires_grad:
        return "It is frozen: leave it as it is."
    if got is None:
        return "A rank without a gradient takes part with zeros, and has the mean afterwards."
    n, tolerance = len(own), _tolerance(expected)
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
            is_close(expected, found[name], _tolerance(expected)),
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


# Buckets


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
        run = _run(grade, b.buckets_of_steps, 2, limits, 3)
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
    reduced, sent = _named(run, "all_reduce"), _named(run, "broadcast")
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


def _named(run: Run, name: str) -> list[int]:
    """How many collectives whose name begins so each rank called."""
    events = run.trace.events if run.trace else []
    ranks = range(len(run.results))
    return [
        sum(e.rank == r and e.kind == "collective" and e.name.startswith(name) for e in events)
        for r in ranks
    ]


@task("3.12")
def test_by_default_torch_reduces(grade: Grade) -> None:
    run = _run(grade, b.buckets_of_steps, 2, SMALL, 2, True)
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
    _check_branches(orders, _run(grade, b.in_different_orders, n, orders).results)


@task("3.12")
def test_ranks_use_different_branches(grade: Grade) -> None:
    """Rank 0 alone uses branch 3, rank 2 alone branch 5, and nobody branch 4."""
    orders = [[0, 3, 1], [2, 1], [1, 5, 0], [1]]
    run = _run(grade, b.in_different_orders, len(orders), orders)
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
            order = later if step else first
            expected = [[f"weights.{branch}"] for branch in order]
            check(
                found["calls"] == expected,
                f"{here}: buckets should leave in the order {expected}, which is that of "
                f"{'rank 0, in the first step' if step else 'assign_buckets'}, on all ranks; they "
                f"left in the order {found['calls']}.",
            )


# Time


@task("3.12")
@pytest.mark.parametrize("kind", ["slow computation", "slow links", "both alike"])
def test_buckets_travel_during_the_backward_pass(grade: Grade, kind: str) -> None:
    longest_s = {"slow computation": 2e-3, "slow links": 1e-4, "both alike": 3e-4}[kind]
    layers = [
        Layer(grade.random.randint(20_000, 100_000), grade.random.uniform(0.3, 1.0) * longest_s)
        for _ in range(6)
    ]
    limits = Limits(500_000, 100_000)
    order = [0, 1, 2, 5, 4, 3]  # when layer 5 is done in the first step, two buckets may leave
    before_s = longest_s / 2
    computing_s = before_s + sum(layer.backward_s for layer in layers)
    run = _run(grade, b.timed, 4, layers, order, before_s, limits, cluster=UNIFORM)
    for rank, steps in enumerate(run.results):
        for step, found in enumerate(steps):
            here = f"{kind}, layers used in the order {order}, step {step}, rank {rank} of 4"
            used = order if step else sorted(order)
            case = Case(tuple(Param(layers[i].numel) for i in used), *limits)
            buckets = [[used[i] for i in bucket] for bucket in buckets_of(case)]
            sizes = [sum(4 * layers[i].numel for i in bucket) for bucket in buckets]
            check(
                found["num_bytes"] == sizes,
                f"{here}: buckets of {sizes} bytes should be reduced, not of {found['num_bytes']}.",
            )
            _check_times(here, step, computing_s, buckets, found)


def _check_times(
    here: str, step: int, computing_s: float, buckets: Sequence[Sequence[int]], found: Any
) -> None:
    check(
        found["computed_s"] <= computing_s + CLOCK_S,
        f"{here}: the backward pass computes for {_ms(computing_s)}, but took "
        f"{_ms(found['computed_s'])}: a hook should start an all-reduce and return. Wait in "
        "finish_gradient_synchronization.",
    )
    complete_s = accumulate((max(found["came_s"][i] for i in bucket) for bucket in buckets), max)
    ready_s = list(complete_s)
    for place, (left_s, came_s) in enumerate(zip(found["left_s"], ready_s, strict=True)):
        check(
            left_s <= came_s + CLOCK_S,
            f"{here}: bucket {place} of {len(buckets)} was complete after {_ms(came_s)} of the "
            f"backward pass, and those before it had left; it left after {_ms(left_s)}, and the "
            f"backward pass ended after {_ms(found['computed_s'])}. Start each all-reduce in the "
            "hook of its last gradient.",
        )
    _check_waiting(here, step, ready_s, found)


def _check_waiting(here: str, step: int, ready_s: Sequence[float], found: Any) -> None:
    alone_s, end_s = found["alone_s"], found["computed_s"]
    rest_s = [sum(alone_s[place:]) for place in range(len(alone_s))]
    done_s = max(came + rest for came, rest in zip(ready_s, rest_s, strict=True))
    waits_s = max(0.0, done_s - end_s)
    waited_s = found["end_s"] - end_s
    check(
        step == 0 or waited_s <= RIGHT_TIMES * waits_s + CLOCK_S,  # the first agrees on an order
        f"{here}: by its docstring, the step waits {_ms(waits_s)} after the backward pass; it "
        f"waited {_ms(waited_s)}, more than {RIGHT_TIMES} times as long. Send nothing besides the "
        "buckets, and start those that are left before the first wait.",
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4f} ms"


# no_sync


@task("3.12")
def test_no_sync_accumulates_without_a_message(grade: Grade) -> None:
    n = 2
    for kinds in (b.ACCUMULATIONS[:1], b.ACCUMULATIONS[1:]):
        run = _run(grade, b.accumulate, n, SMALL, kinds)
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
                is_close(expected, got, _tolerance(expected)),
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


# Memory


@task("3.12")
def test_gradients_are_where_parameters_are(grade: Grade) -> None:
    for rank, found in enumerate(grade.run(b.on_another_device, 2).results):
        check(
            found == {"weight": "xpu:0", "bias": "xpu:0"},
            f"rank {rank} of 2: parameters are on the device xpu:0, and so should be their "
            f"buckets; the devices of the gradients are {found}.",
        )


@task("3.12")
def test_gradients_take_no_second_memory(grade: Grade) -> None:
    num_layers, width = 10, grade.random.randint(60, 90)
    weight = 4 * width**2
    limits = Limits(4 * weight, weight)
    run = grade.run(b.in_little_memory, 2, num_layers, width, limits, options=MEASURED)
    activations = 4 * width * 4 * (num_layers + 2)
    most = (2 * num_layers + 1) * weight + activations
    check_peak(
        *(run, [most] * 2),
        "That is the parameters, the buckets whose views are the gradients, the gradient of one "
        "parameter that is just computed, and the activations. Let param.grad be a view of the "
        "bucket before the backward pass, so that autograd adds to it, and free the old buckets "
        "before you make new ones.",
    )
