"""Judges task 3.11: training as in one process; bucket contents, times and memory."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, check_cost, task
from distlab.launch import LaunchError
from judging.checks import (
    MEASURED,
    ON_CPU,
    UNIFORM,
    check_peak,
    check_waited,
    is_close,
    of_members,
    short_beside,
    uneven,
)
from judging.expect import expect, expect_cost, expect_on_all_ranks
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from judging.models import Odd
from phase3 import ddp as b
from phase3.buckets import Case, Param
from phase3.ddp import Layer, Limits, Plan
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
    """Run a body; if the launch fails, put the likely cause at the front of the error."""
    try:
        return grade.run(body, world_size, *args, if_stuck=STUCK, **options)
    except LaunchError as error:
        headline = f"{error}".partition("\n")[0]
        cause = next((cause for words, cause in CAUSES.items() if words in headline), "")
        if cause:
            error.args = (f"{cause} Here: {error}", *error.args[1:])
        raise


# Training


def _rows(grade: Grade, n: int) -> tuple[tuple[int, ...], ...]:
    """Draw the rows of four steps; with three or more ranks, rank 1 has none in the second step."""
    steps = [[grade.random.randint(1, 4) for _ in range(n)] for _ in range(4)]
    if n > 2:
        steps[1][1] = 0
    return tuple(map(tuple, steps))


@task("3.11", real=True)
@pytest.mark.parametrize("n", [1, 3])
def test_training_equals_one_process(grade: Grade, n: int) -> None:
    plan = Plan(Limits(grade.random.randint(100, 400), 60), _rows(grade, n), is_noted=False)
    options = uneven(grade.random, n) if grade.is_simulated else None
    run = run_together(grade, b.train, n, [plan], options=options)
    _check_training(plan, run.results)
    if grade.is_simulated:
        check_waited(run)
        _check_reduced_by_default(plan, run)


@task("3.11")
def test_training_inside_a_group(grade: Grade) -> None:
    plan = Plan(Limits(grade.random.randint(100, 400), 60), _rows(grade, len(MEMBERS)))
    run = grade.run(*(inside_group, OUTER_WORLD_SIZE, b.train, [plan]), if_stuck=STUCK_IN_GROUP)
    _check_training(plan, of_members(run), f", inside the group {list(MEMBERS)}")


def _check_training(plan: Plan, results: Sequence[Any], where: str = "", place: int = 0) -> None:
    """Check every step's gradients and buckets, and that nothing is sent inside no_sync.

    Args:
        results: Each rank's results for all plans.
        place: The index of this plan.
    """
    by_rank = [of_rank[place] for of_rank in results]
    for step, right in enumerate(b.train_alone(plan)):
        first = by_rank[0]["steps"][step]
        rows = [*plan.rows[step]]
        for rank, of_rank in enumerate(by_rank):
            result = of_rank["steps"][step]
            here = f"{plan.how}, step {step}{where}, rows by rank {rows}, rank {rank}"
            check(
                not result["inside"],
                f"{here}: a backward pass inside of no_sync should send nothing.",
            )
            _check_gradients(here, right, result, rank, plan)
            expect(f"{here}: gradients, bit for bit,", result["gradients"], first["gradients"])
            if plan.is_noted:
                _check_buckets(here, step, result, _expected(plan.limits, step, by_rank))


def _check_gradients(here: str, right: Any, result: Any, rank: int, plan: Plan) -> None:
    for name, expected in right["gradients"].items():
        got = result["gradients"][name]
        check(
            is_close(expected, got, _tolerance_of(expected)),
            f"{here}: after finish_gradient_synchronization, the gradient of {name} should be "
            f"{short_beside(expected, got)}; it is {short_beside(got, expected)}. "
            f"{_why(name, expected, got, right['own'][rank].get(name), plan)}",
        )


def _tolerance_of(expected: Any) -> float:
    """Return how far rounding may move values from the expected ones."""
    return TOLERANCE * max([1.0, *map(abs, expected or ())])


def _why(name: str, expected: Any, got: Any, own: Any, plan: Plan) -> str:
    n = len(plan.rows[0])
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


@task("3.11")
def test_ranks_start_as_rank_0(grade: Grade) -> None:
    first = b.state_of(Odd(1))
    for rank, result in enumerate(grade.run(b.start, 3).results):
        here = f"rank {rank} of 3"
        for name, expected in first.items():
            kind = "parameter" if name in PARAMETERS else "buffer"
            what = f"{here}: the {kind} {name}, like that of rank 0,"
            cause = "Frozen parameters and all buffers are part of the model."
            expect(what, result["state"][name], expected, cause)
        for what, (expected, got) in result["values"].items():
            cause = "Wrap the module that was passed, as it is."
            expect(f"{here}: {what}", got, expected, cause)


@task("3.11")
def test_a_rank_evaluates_alone(grade: Grade) -> None:
    run = grade.run(
        *(b.evaluate_alone, 3),
        if_stuck="Rank 0 calls the forward pass once more than the others, to evaluate. forward "
        "should send nothing: agree on the order of the buckets in "
        "finish_gradient_synchronization, where all ranks come.",
    )
    what = "the parameters that have a gradient after forward under torch.no_grad"
    expect_on_all_ranks(what, run.results, [], "forward should leave gradients as they are, None.")


@task("3.11")
def test_no_sync_accumulates_without_a_message(grade: Grade) -> None:
    rows = ((6, 6), (6, 6))  # two steps, since the bucket order changes after the first
    for hows in (b.ACCUMULATIONS[:1], b.ACCUMULATIONS[1:]):
        plans = [Plan(SMALL, rows, how=how) for how in hows]
        run = run_together(grade, b.train, 2, plans)
        for place, plan in enumerate(plans):
            for rank, of_rank in enumerate(run.results):
                check(
                    plan.how == b.INSIDE_ONLY or of_rank[place]["steps"][-1]["before finish"],
                    f"{plan.how}, rank {rank} of 2: no bucket left during the backward pass, but "
                    "only in finish_gradient_synchronization. no_sync should end with its block, "
                    "also by an error, and a gradient that is added inside of it does not count as "
                    "one that has come.",
                )
            _check_training(plan, run.results, place=place)
        _check_nothing_besides(run)


# Buckets


def _expected(limits: Limits, step: int, by_rank: Sequence[Any]) -> list[list[str]]:
    """Return the right buckets of a step.

    From step 1 on, they follow the order in which gradients arrived on rank 0 in step 0.
    """
    came = by_rank[0]["arrived"]
    order = [*came, *(name for name in reversed(TRAINABLE) if name not in came)]
    names = order[::-1] if step else TRAINABLE
    params = [
        Param(PARAMETERS[name].numel(), str(PARAMETERS[name].dtype).removeprefix("torch."))
        for name in names
    ]
    return [[names[i] for i in bucket] for bucket in buckets_of(Case(tuple(params), *limits))]


@task("3.11")
def test_buckets_are_those_of_assign_buckets(grade: Grade) -> None:
    bounds = (grade.random.randint(150, 250), 60), (2**20, 2**20), (8, 8)
    plans = [Plan(Limits(*bound), ((2, 2),) * 3) for bound in bounds]
    run = run_together(grade, b.train, 2, plans)
    for place, plan in enumerate(plans):
        _check_training(plan, run.results, f", {plan.limits}", place)
    _check_nothing_besides(run)


def _check_reduced_by_default(plan: Plan, run: Run) -> None:
    by_rank = [facts for (facts,) in run.results]
    buckets = [
        names for step in range(len(plan.rows)) for names in _expected(plan.limits, step, by_rank)
    ]
    sizes = sorted(sum(PARAMETERS[name].nbytes for name in bucket) for bucket in buckets)
    events = run.trace.events if run.trace else []
    calls = [event for event in events if event.kind == "collective"]
    for rank in range(len(run.results)):
        got = sorted(c.num_bytes for c in calls if c.rank == rank and c.name[:5] == "all_r")
        what = f"rank {rank}, without an argument all_reduce: the bytes of all all-reduces, sorted,"
        expect_cost(what, got, sizes, "A bucket travels in one all-reduce.")


def _check_buckets(here: str, step: int, result: dict[str, Any], expected: list[list[str]]) -> None:
    which = (
        "After the first step, the buckets are those for the order in which rank 0's gradients "
        "came in it outside of no_sync, with those that did not come last."
        if step
        else "The first step has the buckets of assign_buckets for the trainable parameters."
    )
    expect(
        f"{here}: the bytes of the buckets with which all_reduce is started",
        result["num_bytes"],
        [sum(PARAMETERS[name].nbytes for name in bucket) for bucket in expected],
        f"{which} Trainable parameters only, a shared one once.",
    )
    expect(
        f"{here}, after the step: the parameters whose gradients lie in each summed bucket",
        *([sorted(names) for names in result["names"]], [sorted(bucket) for bucket in expected]),
        "Gradients should be views of the buckets, so that nothing is copied, until the next "
        f"backward pass begins: new buckets are made only then. {which}",
    )


def _check_nothing_besides(run: Run) -> None:
    events = run.trace.events if run.trace else []
    calls = [(event.rank, event.name[:5]) for event in events if event.kind == "collective"]
    for rank, plans in enumerate(run.results):
        noted = sum(len(step["names"]) for facts in plans for step in facts["steps"])
        reduced, sent = (calls.count((rank, name)) for name in ("all_r", "broad"))
        check(
            reduced == noted,
            f"rank {rank}: the all_reduce given is the only way for gradients to travel; it was "
            f"called {noted} times, and there were {reduced} all-reduces.",
        )
        others = run.collectives[rank] - reduced - sent
        check_cost(
            not others and sent <= NUM_BROADCASTS * len(plans),
            f"rank {rank}: besides the all-reduces, there should be {NUM_BROADCASTS - 1} "
            "broadcasts at the start, one for each parameter and buffer, and one of the order "
            f"after the first step; with {len(plans)} models, there were {sent} broadcasts and "
            f"{others} other collectives.",
        )


# Times and memory of buckets

RIGHT_TIMES = 1.05
LONGEST_S = {"slow computation": 2e-3, "slow links": 1e-4}  # longest backward pass of a layer
CLOCK_S = 15e-6  # time taken by all readings of the simulated clock


@task("3.11")
@pytest.mark.parametrize("kind", LONGEST_S)
def test_buckets_travel_during_the_backward_pass(grade: Grade, kind: str) -> None:
    longest_s = LONGEST_S[kind]
    layers = [
        Layer(grade.random.randint(20_000, 100_000), grade.random.uniform(0.3, 1.0) * longest_s)
        for _ in range(6)
    ]
    limits, before_s = Limits(500_000, 100_000), longest_s / 2
    # In the first step, two buckets can be sent as soon as layer 5 is done.
    order = [0, 1, 2, 5, 4, 3]
    computing_s = before_s + sum(layer.backward_s for layer in layers)
    run = run_together(grade, b.timed, 4, layers, order, before_s, limits, cluster=UNIFORM)
    for rank, steps in enumerate(run.results):
        for step, result in enumerate(steps):
            here = f"{kind}, layers used in the order {order}, step {step}, rank {rank} of 4"
            used = order if step else sorted(order)
            case = Case(tuple(Param(layers[i].numel) for i in used), *limits)
            buckets = [[used[i] for i in bucket] for bucket in buckets_of(case)]
            sizes = [sum(4 * layers[i].numel for i in bucket) for bucket in buckets]
            expect(f"{here}: the bytes of the buckets", result["num_bytes"], sizes)
            _check_times(here, step, computing_s, buckets, result)


def _check_times(
    here: str, step: int, computing_s: float, buckets: Sequence[Sequence[int]], result: Any
) -> None:
    check_cost(
        result["computed_s"] <= computing_s + CLOCK_S,
        f"{here}: the backward pass computes for {_ms(computing_s)}, but took "
        f"{_ms(result['computed_s'])}: a hook should start an all-reduce and return. Wait in "
        "finish_gradient_synchronization.",
    )
    in_order = (max(result["came_s"][i] for i in bucket) for bucket in buckets)
    ready_s = [*accumulate(in_order, max)]
    for place, (left_s, came_s) in enumerate(zip(result["left_s"], ready_s, strict=True)):
        check_cost(
            left_s <= came_s + CLOCK_S,
            f"{here}: bucket {place} of {len(buckets)} was complete after {_ms(came_s)} of the "
            f"backward pass, and those before it had left; it left after {_ms(left_s)}, and the "
            f"backward pass ended after {_ms(result['computed_s'])}. Start each all-reduce in the "
            "hook of its last gradient.",
        )
    if step:  # in the first step, ranks also agree on an order
        _check_waiting(here, ready_s, result)


def _check_waiting(here: str, ready_s: Sequence[float], result: Any) -> None:
    alone_s, computed_s = result["alone_s"], result["computed_s"]
    rest_s = [sum(alone_s[place:]) for place in range(len(alone_s))]
    done_s = max(ready + rest for ready, rest in zip(ready_s, rest_s, strict=True))
    waits_s, waited_s = max(0.0, done_s - computed_s), result["end_s"] - computed_s
    check_cost(
        waited_s <= RIGHT_TIMES * waits_s + CLOCK_S,
        f"{here}: by its docstring, the step waits {_ms(waits_s)} after the backward pass; it "
        f"waited {_ms(waited_s)}, more than {RIGHT_TIMES} times as long. Send nothing besides the "
        "buckets, and start those that are left before the first wait.",
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4f} ms"


@task("3.11")
def test_gradients_are_where_parameters_are(grade: Grade) -> None:
    by_rank = grade.run(b.on_another_device, 2, options=ON_CPU).results
    right = {"weight": "xpu:0", "bias": "xpu:0"}
    cause = "Buckets lie where their parameters do."
    expect_on_all_ranks("the devices of the gradients of a model on xpu:0", by_rank, right, cause)


@task("3.11")
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
        "bucket as soon as its hook runs, or before the backward pass, and free the old buckets "
        "before you make new ones.",
    )
