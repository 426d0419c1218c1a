"""Judges tasks 2.8 and 2.9: a cut into stages, their messages, and what they compute."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, product
from math import inf
from random import Random
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted
from judging.checks import (
    MEASURED,
    check_no_collective,
    check_refused,
    check_waited,
    distance,
    of_members,
    short,
    short_beside,
    uneven,
)
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import stages as b
from phase2.stages import ALL_TRAINED, NUM_BLOCKS, SOME_FROZEN, Plan, train_alone

Costs = Sequence[float]
FIXED: list[tuple[list[float], int]] = [
    ([3, 1, 1, 1, 3], 3),
    ([3, 3, 2, 6, 1, 4], 3),
    ([1, 1, 1, 1, 1], 4),  # filled up to twice the mean, one stage is left empty
    ([9, 4, 4, 4, 4, 4, 4, 9], 4),  # embedding and head cost more than a layer
    ([1, 1, 1, 1, 1, 1, 1, 10], 2),
    ([10, 1, 1, 1, 1, 1, 1, 1], 2),
    ([7, 7, 4, 9, 1, 5], 3),  # stages of 7, 11 and 15 have the smallest sum of squares
]
FREE: list[tuple[list[float], int]] = [([0, 0, 5, 0, 0], 4), ([0, 0, 0], 2), ([7, 0, 0, 0], 3)]
UNITS = (1, 1e-7)  # costs may be seconds
FACTOR = 1 + 1e-9  # rounding
FEW_TIMES = 10  # so many times L²·stages are still about as many steps
ONLY_ONCE = "Work out each part of the model only once."


@task("2.8")
def test_every_layer_is_in_one_stage(grade: Grade) -> None:
    sizes = [(layers, p) for layers in range(1, 10) for p in range(1, layers + 1)]
    cases = [([grade.random.randint(1, 9) for _ in range(n)], p) for n, p in sizes]
    cases = [*cases, *FREE]  # type: ignore[list-item]
    for (costs, p), cut in zip(cases, grade.call(b.cuts_of, cases), strict=True):
        _check_parts(costs, p, cut)


def _check_parts(costs: Costs, p: int, cut: b.Cut) -> None:
    yours = short([range(*stage) for stage in cut])
    here = f"costs {short(costs)} in {counted(p, 'stage')}: yours are {yours}"
    check(
        len(cut) == p,
        f"{here}. They are {counted(len(cut), 'stage')}; they should be {p}.",
    )
    empty = next((stage for stage, (start, stop) in enumerate(cut) if start >= stop), None)
    check(
        empty is None,
        f"{here}. Stage {empty} has no layer: its rank would have nothing to do. Keep a layer "
        "for every stage, even if layers cost nothing.",
    )
    ends = [0, *(stop for _, stop in cut)]
    starts = [*(start for start, _ in cut), len(costs)]
    check(
        ends == starts,
        f"{here}. The first should start with layer 0, each of the others where the one before it "
        f"stops, and the last stop at {len(costs)}: the stop of a range is not in it.",
    )


@task("2.8")
def test_the_most_expensive_stage_costs_least(grade: Grade) -> None:
    cases = [*FIXED, *FREE, *(_drawn(grade.random) for _ in range(60))]
    for (costs, p), cut in zip(cases, grade.call(b.cuts_of, cases), strict=True):
        _check_parts(costs, p, cut)
        _check_largest(costs, p, cut)


def _drawn(random: Random) -> tuple[list[float], int]:
    num_layers = random.randint(3, 12)
    draw = random.choice([lambda: random.randint(1, 20), lambda: 10 * random.random() ** 4])
    unit = random.choice(UNITS)
    return [draw() * unit for _ in range(num_layers)], random.randint(2, num_layers)


def _check_largest(costs: Costs, p: int, cut: b.Cut) -> None:
    found = [sum(costs[start:stop]) for start, stop in cut]
    least = _least_largest(costs, p)
    check(
        max(found) <= least * FACTOR,
        f"costs {short_beside(costs, found)} in {counted(p, 'stage')}: yours cost "
        f"{short_beside(found, costs)}, and the most expensive {max(found):g}; in the best "
        f"cut it costs {least:g}. Equal numbers of layers are not equal costs, and a stage that is "
        "filled up to the mean, before the rest is looked at, may leave too much for the others.",
    )


def _least_largest(costs: Costs, p: int) -> float:
    """The cost of the most expensive stage in the best cut."""
    before = [0, *accumulate(costs)]
    best = [0.0, *[inf] * len(costs)]  # best[i]: the layers before i
    for _ in range(p):
        best = [
            min((max(best[i], before[end] - before[i]) for i in range(end)), default=inf)
            for end in range(len(before))
        ]
    return best[-1]


@task("2.8")
@pytest.mark.parametrize(("num_layers", "p"), [(96, 16), (200, 16), (200, 2)])
def test_a_deep_model_is_cut_at_once(grade: Grade, num_layers: int, p: int) -> None:
    costs: list[float] = [grade.random.randint(1, 99) for _ in range(num_layers)]
    here = f"{num_layers} layers in {p} stages"
    run = grade.run(
        *(b.tallied_cut, 1, costs, p),
        if_slow=f"{here} should take about L²·{p} steps. Trying every cut takes forever: in 16 "
        f"stages there are more than 10^18. {ONLY_ONCE}",
    )
    cut, count = run.results[0]["cut"], run.results[0]["count"]
    _check_parts(costs, p, cut)
    _check_largest(costs, p, cut)
    about = num_layers**2 * p
    check(
        count <= FEW_TIMES * about,
        f"{here} should take about L²·{p} = {about:,} additions and comparisons; yours took "
        f"{count:,}. {ONLY_ONCE} Prefix sums give the cost of any stage by one subtraction.",
    )


@task("2.8")
@pytest.mark.parametrize(("num_layers", "num_stages"), [(6, 7), (0, 1), (12, 96), (3, 0), (5, -2)])
def test_impossible_numbers_are_refused(grade: Grade, num_layers: int, num_stages: int) -> None:
    refused = grade.call(b.refusal_of_cut, num_layers, num_stages)
    what = f"to cut {counted(num_layers, 'layer')} into {counted(num_stages, 'stage')}"
    check_refused([refused], what, str(num_layers), str(num_stages))


@task("2.8")
def test_the_costs_are_not_changed(grade: Grade) -> None:
    costs = [float(grade.random.randint(1, 9)) for _ in range(7)]
    after = grade.call(b.costs_after, [*costs], 3)
    check(after == costs, f"costs were {costs}, and are {after} afterwards: they are the caller's.")


SENDS_STUCK = (
    "Every rank calls send_tensors first, and recv_tensors before it waits for the works: "
    "send_tensors must not wait for the receiver."
)
HEADER_BYTES, MORE_BYTES = 1024, 256  # up to four tensors; each one more
HEADER = 2  # messages at most


@task("2.9", real=True)
@pytest.mark.parametrize("n", [2, 3])
def test_any_tensors_arrive(grade: Grade, n: int) -> None:
    run = grade.run(b.pass_around, n, options=uneven(grade.random, n), if_stuck=SENDS_STUCK)
    _check_arrived(run.results)
    if grade.is_simulated:
        check_no_collective(run, "tensors should travel in messages")
        _check_waited(run)


def _check_arrived(by_rank: Sequence[Any]) -> None:
    for rank, result in enumerate(by_rank):
        check(all(result["unchanged"]), f"rank {rank}: send_tensors changed what it was given.")
        src = (rank - 1) % len(by_rank)
        for wanted, got in zip(b.descriptions_from(src), result["arrived"], strict=True):
            _check_list(f"rank {rank} of {len(by_rank)}, from rank {src}", wanted, got)


CAUSES = {
    "dtype": "The header tells the dtype: allocate what comes in it.",
    "shape": "The header tells the shape, also () and (0, 3).",
    "requires_grad": "The header tells whether a gradient is required: requires_grad_ sets it.",
    "values": "A tensor that is not contiguous has to be copied before it is sent, and every "
    "message is received into a tensor of its own size, in the order of the sends.",
    "leaf": "What arrives begins a new graph.",
}


def _check_list(here: str, wanted: list[Any], got: list[Any]) -> None:
    kinds = [f"{x['dtype']} {tuple(x['shape'])}" for x in wanted]
    check(
        len(wanted) == len(got),
        f"{here}: of the tensors that were sent, {short(kinds)}, {len(got)} arrived.",
    )
    for kind, expected, found in zip(kinds, wanted, got, strict=True):
        for name, cause in CAUSES.items():
            check(
                expected[name] == found[name],
                f"{here}: of a tensor that was sent as {kind}, {name} should be "
                f"{short(expected[name])}, and is {short(found[name])}. {cause}",
            )


def _check_waited(run: Run) -> None:
    left = run.trace.unwaited if run.trace else []
    check(
        not left,
        "send_tensors should return the works of all its messages, the header too, and "
        "recv_tensors should have everything on return. Nobody could wait for, or has waited for: "
        f"{'; '.join(' '.join(row.split()) for row in left[:2])}",
    )


@task("2.9")
def test_a_tensor_is_a_message(grade: Grade) -> None:
    run = grade.run(b.send_one_way, 2)
    check_no_collective(run, "tensors should travel in messages")
    sent = [[x.nbytes for x in tensors] for tensors in b.lists_of(0)]
    _check_messages(f"rank 0 to rank 1, in {len(sent)} calls", _sizes_sent(run, 0, 1), sent)


def _sizes_sent(run: Run, src: int, dst: int) -> list[int]:
    """Bytes of the messages from one rank to another, in the order of their numbers.

    They may arrive in another order: a short one overtakes a long one.
    """
    pairs = run.trace.pairs() if run.trace else []
    sends = [send for send, recv in pairs if (send.rank, recv.rank) == (src, dst)]
    return [send.num_bytes for send in sorted(sends, key=lambda send: send.message)]


def _check_messages(here: str, found: Sequence[int], sent: Sequence[Sequence[int]]) -> None:
    """Check the messages of several ``send_tensors`` from one rank to another.

    Args:
        here: The two ranks, for the message.
        found: Bytes of all messages, in order.
        sent: Bytes of the tensors of each call, in order.
    """
    expected = Counter(size for sizes in sent for size in sizes)
    missing, more = expected - Counter(found), Counter(found) - expected
    check(
        not missing,
        f"{here}: tensors of {short(sorted(expected.elements()))} bytes should be sent, each in a "
        f"message of its own and in its own dtype; messages of {short(sorted(missing))} bytes are "
        f"missing. There are messages of {short(sorted(found))} bytes.",
    )
    allowed = sum(HEADER_BYTES + MORE_BYTES * max(0, len(sizes) - 4) for sizes in sent)
    check(
        more.total() <= HEADER * len(sent) and sum(more.elements()) <= allowed,
        f"{here}: tensors of {short(sorted(expected.elements()))} bytes should be sent, each once "
        f"and only if it is needed there, after a header of at most {HEADER} messages, with at "
        f"most {allowed:,} bytes in all headers. Yours sends besides these tensors messages of "
        f"{short(sorted(more.elements()))} bytes.",
    )
    last = sent[-1][-1:] if sent else []
    check(
        found[-1:] == last or not last,
        f"{here}: the last message should be a tensor of {short(last)} bytes; yours has "
        f"{short(found[-1:])} bytes. Send no header where no tensor follows.",
    )


@task("2.9")
def test_messages_inside_a_group(grade: Grade) -> None:
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.pass_around),
        if_stuck=f"{SENDS_STUCK} {STUCK_IN_GROUP}",
    )
    check(len(of_members(run)) == len(MEMBERS), "a rank of the group returned nothing.")
    _check_arrived(of_members(run))


STAGES_STUCK = (
    "Each forward sends to the next rank, and each backward sends a gradient back for every tensor "
    "that requires one, and for no other: sender and receiver must agree which these are."
)
ALL_BACK = (
    "Gradients come back for all tensors that require one, add up over the steps, and come of the "
    "last forward."
)
OF_THE_GRAPH = (
    "Give the stage what forward was given, not a copy, and keep outputs that have their graph."
)
PLANS = [ALL_TRAINED, SOME_FROZEN]
ROUNDING = 1e-6  # some numbers are in float32; a gradient that is wrong is so by more


def _cuts(random: Random, n: int) -> list[int]:
    return [0, *sorted(random.sample(range(1, NUM_BLOCKS), n - 1)), NUM_BLOCKS]


@task("2.9")
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_stages_compute_what_one_process_does(grade: Grade, n: int) -> None:
    _check_training(grade, n)


@task("2.9", real=True)
def test_three_stages_do_so_in_processes_too(grade: Grade) -> None:
    _check_training(grade, 3)


def _check_training(grade: Grade, n: int) -> None:
    cuts = _cuts(grade.random, n)
    run = grade.run(b.train_all, n, PLANS, cuts, if_stuck=STAGES_STUCK)
    _check_results(run.results, cuts)
    if grade.is_simulated:
        check_no_collective(run, "stages should talk to their neighbours in messages")
        check_waited(run)
        _check_edges(run, cuts)


@task("2.9")
def test_stages_inside_a_group(grade: Grade) -> None:
    cuts = _cuts(grade.random, len(MEMBERS))
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.train_all, PLANS, cuts),
        if_stuck=f"{STAGES_STUCK} {STUCK_IN_GROUP}",
    )
    _check_results(of_members(run), cuts)


def _check_results(by_rank: Sequence[Any], cuts: Sequence[int]) -> None:
    for number, plan in enumerate(PLANS):
        _check_plan([results[number] for results in by_rank], plan, cuts)


def _check_plan(by_rank: Sequence[Any], plan: Plan, cuts: Sequence[int]) -> None:
    for rank, result in enumerate(by_rank):
        frozen = f"; frozen are {list(plan.frozen)}" if plan.frozen else ""
        here = (
            f"stage {rank} of {len(by_rank)}, blocks {cuts[rank]} to {cuts[rank + 1] - 1}{frozen}"
        )
        for step, found in enumerate(result["steps"]):
            is_last = rank == len(by_rank) - 1
            _check_output(f"{here}, step {step}", found, plan, step, is_last=is_last)
        _check_input_gradients(here, result, plan, is_first=rank == 0)
        _check_state(here, result["state"], train_alone(plan).state)


def _check_output(here: str, found: Any, plan: Plan, step: int, *, is_last: bool) -> None:
    if not is_last:
        check(
            found["output"] == b.kind_of(None),
            f"{here}: forward should return None, as the last rank alone returns what its stage "
            f"returns; it returned {found['output']}.",
        )
        return
    alone = train_alone(plan)
    kind = " (evaluation)" if step in plan.evaluations else ""
    check(
        distance(alone.outputs[step], found["output"]) <= ROUNDING,
        f"{here}{kind}: the output differs from that of one process, and the loss is "
        f"{found['loss']:.6f} in place of {alone.losses[step]:.6f}. If this is not step 0, the "
        "gradients of an earlier step were wrong somewhere.",
    )
    check(
        found["has_graph"] == alone.has_graph[step],
        f"{here}{kind}: whether the outputs require a gradient should be {alone.has_graph[step]}, "
        f"as in one process; it is {found['has_graph']}. An evaluation pass records no graph.",
    )


def _check_input_gradients(here: str, result: Any, plan: Plan, *, is_first: bool) -> None:
    expected = train_alone(plan).input_gradients if is_first else [None] * plan.num_steps
    for step, (wanted, found) in enumerate(zip(expected, result["steps"], strict=True)):
        got = found["input_gradient"]
        check(
            distance(wanted, got) <= ROUNDING,
            f"{here}, step {step}: the gradient of the input that requires one is {short(got)}; in "
            f"one process it is {short(wanted)}. " + (OF_THE_GRAPH if got is None else ALL_BACK),
        )


def _check_state(here: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, got in found.items():
        wanted = expected[name]
        check(
            distance(wanted, got) <= ROUNDING,
            f"{here}: after all steps, {name} of one process is {short(wanted)}, and here "
            f"{short(got)}. {ALL_BACK}",
        )


def _check_edges(run: Run, cuts: Sequence[int]) -> None:
    """Check what each rank has sent to each other one."""
    for src, dst in product(range(len(run.results)), repeat=2):
        sent = [sizes for plan in PLANS for sizes in _sent(plan, cuts, src, dst)]
        way = "activations forward" if src < dst else "gradients back"
        _check_messages(
            f"{way}, rank {src} to rank {dst}, all steps", _sizes_sent(run, src, dst), sent
        )


def _sent(plan: Plan, cuts: Sequence[int], src: int, dst: int) -> list[list[int]]:
    """Bytes of the tensors that go from one rank to another, call by call."""
    if abs(src - dst) != 1:
        return []
    border = [step[cuts[max(src, dst)] - 1] for step in train_alone(plan).passed]
    if src < dst:
        return [[size for size, _ in tensors] for tensors in border]
    backward = [border[step] for step in range(plan.num_steps) if step not in plan.evaluations]
    needed = [[size for size, requires_grad in tensors if requires_grad] for tensors in backward]
    return [sizes for sizes in needed if sizes]


@task("2.9")
def test_no_tensor_is_kept_for_the_next_step(grade: Grade) -> None:
    one, four = (grade.run(b.train_long, 3, steps, options=MEASURED) for steps in (1, 4))
    for rank, found in enumerate(four.results):
        of_stage = ["a Tensor", "a tuple"] * 2
        expected = of_stage if rank == 2 else [b.kind_of(None)] * 4
        for step, (kind, wanted, got) in enumerate(zip(of_stage, expected, found, strict=True)):
            check(
                got == wanted,
                f"rank {rank} of 3, step {step}, in which each stage returns {kind}: forward "
                f"should return {wanted}, and returned {got}. The last rank returns what its stage "
                "returns, a tuple only where it is one, and the others return None.",
            )
    for rank, (first, all_steps) in enumerate(zip(one.peak_bytes, four.peak_bytes, strict=True)):
        check(
            all_steps <= first,
            f"rank {rank} of 3 held at most {first:,} bytes in its first step, and {all_steps:,} "
            "in a later one. Drop what backward needed as soon as it has run: an output that is "
            "kept keeps the graph behind it.",
        )
