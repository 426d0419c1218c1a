"""Judges tasks 2.7 and 2.8: cuts into stages, the stages' messages, and their results."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, product
from math import inf
from random import Random
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, check_cost, task
from distlab.util.text import counted
from judging.calls import refused
from judging.checks import (
    MEASURED,
    check_no_collective,
    check_refused,
    check_waited,
    short,
    short_beside,
    uneven,
)
from judging.expect import expect, results_in_group
from judging.groups import MEMBERS
from phase2 import stages as b
from phase2.stages import ALL_TRAINED, NUM_BLOCKS, SOME_FROZEN, Plan, train_alone

# Task 2.7: partition_layers

Costs = Sequence[float]
FIXED: list[tuple[list[float], int]] = [
    ([3, 1, 1, 1, 3], 3),
    ([3, 3, 2, 6, 1, 4], 3),
    ([1, 1, 1, 1, 1], 4),  # if stages are filled up to twice the mean cost, one stays empty
    ([9, 4, 4, 4, 4, 4, 4, 9], 4),  # embedding and head cost more than a layer
    ([1, 1, 1, 1, 1, 1, 1, 10], 2),
    ([10, 1, 1, 1, 1, 1, 1, 1], 2),
    ([7, 7, 4, 9, 1, 5], 3),  # 7, 11 and 15 minimize the sum of squares, but not the maximum
    ([0, 0, 5, 0, 0], 4),
    ([0, 0, 0], 2),
    ([7, 0, 0, 0], 3),
]
FEW_TIMES = 10  # cutting L layers may take this many times L²·stages steps
ONLY_ONCE = "Work out each part of the model only once."


@task("2.7")
def test_the_most_expensive_stage_costs_least(grade: Grade) -> None:
    random = grade.random
    sizes = [(layers, p) for layers in range(1, 10) for p in range(1, layers + 1)]
    cases = [([float(random.randint(1, 9)) for _ in range(layers)], p) for layers, p in sizes]
    cases += [*FIXED, *(_drawn(random) for _ in range(60))]
    for (costs, p), found in zip(cases, grade.call(b.cuts_of, cases), strict=True):
        _check_cut(costs, p, found["cut"])
        expect("the caller's costs after the call", found["costs"], costs)


def _drawn(random: Random) -> tuple[list[float], int]:
    num_layers = random.randint(3, 12)
    draw = random.choice([lambda: random.randint(1, 20), lambda: 10 * random.random() ** 4])
    unit = random.choice((1, 1e-7))  # costs may also be times in seconds, which are small
    return [draw() * unit for _ in range(num_layers)], random.randint(2, num_layers)


def _check_cut(costs: Costs, p: int, cut: b.Cut) -> None:
    stages = [[*range(*stage)] for stage in cut]
    here = f"costs {short(costs)} in {counted(p, 'stage')}: yours are {short(stages)}"
    check(
        len(cut) == p and all(stages),
        f"{here}. There should be {counted(p, 'stage')}, each with a layer: a rank without any "
        "would have nothing to do. Keep a layer for every stage, even if layers cost nothing.",
    )
    check(
        [layer for stage in stages for layer in stage] == [*range(len(costs))],
        f"{here}. The first should start with layer 0, each of the others where the one before it "
        f"stops, and the last stop at {len(costs)}: the stop of a range is not in it.",
    )
    found, least = [sum(costs[start:stop]) for start, stop in cut], _least_largest(costs, p)
    check(
        max(found) <= least * (1 + 1e-9),
        f"costs {short_beside(costs, found)} in {counted(p, 'stage')}: yours cost "
        f"{short_beside(found, costs)}, and the most expensive {max(found):g}; in the best "
        f"cut it costs {least:g}. Equal numbers of layers are not equal costs, and a stage that is "
        "filled up to the mean, before the rest is looked at, may leave too much for the others.",
    )


def _least_largest(costs: Costs, p: int) -> float:
    """Return the cost of the most expensive stage in the best cut into ``p`` stages."""
    before = [0, *accumulate(costs)]
    best = [0.0, *[inf] * len(costs)]  # best[i]: the least cost for the layers before i
    for _ in range(p):
        best = [
            min((max(best[i], before[end] - before[i]) for i in range(end)), default=inf)
            for end in range(len(before))
        ]
    return best[-1]


@task("2.7")
@pytest.mark.parametrize(("num_layers", "p"), [(200, 16), (200, 2)])
def test_a_deep_model_is_cut_at_once(grade: Grade, num_layers: int, p: int) -> None:
    costs: list[float] = [grade.random.randint(1, 99) for _ in range(num_layers)]
    about = num_layers**2 * p
    here = f"{num_layers} layers in {p} stages should take about L²·{p} = {about:,} steps"
    run = grade.run(
        *(b.tallied_cut, 1, costs, p),
        if_slow=f"{here}. Trying every cut takes forever: in 16 stages there are more than 10^18. "
        f"{ONLY_ONCE}",
    )
    _check_cut(costs, p, run.results[0]["cut"])
    count = run.results[0]["count"]
    check_cost(
        count <= FEW_TIMES * about,
        f"{here}, additions and comparisons; yours took {count:,}. {ONLY_ONCE} Prefix sums give "
        "the cost of any stage by one subtraction.",
    )


@task("2.7")
def test_impossible_numbers_are_refused(grade: Grade) -> None:
    for num_layers, p in ((6, 7), (0, 1), (12, 96), (3, 0), (5, -2)):
        what = f"to cut {counted(num_layers, 'layer')} into {counted(p, 'stage')}"
        refusal = grade.call(refused, "partition_layers", [1.0] * num_layers, p)
        check_refused([refusal], what, str(num_layers), str(p))


# Task 2.8: send_tensors, recv_tensors

SENDS_STUCK = (
    "Every rank calls send_tensors first, and recv_tensors before it waits for the works: "
    "send_tensors must not wait for the receiver."
)
HEADER_BYTES, MORE_BYTES = 1024, 256  # for up to four tensors, and for each additional one
HEADER = 2  # maximum number of messages in a header
CAUSES = {
    "dtype": "The header tells the dtype: allocate what comes in it.",
    "shape": "The header tells the shape, also () and (0, 3).",
    "requires_grad": "The header tells whether a gradient is required: requires_grad_ sets it.",
    "values": "A tensor that is not contiguous has to be copied before it is sent, and every "
    "message is received into a tensor of its own size, in the order of the sends.",
    "leaf": "What arrives begins a new graph.",
}


@task("2.8", real=True)
@pytest.mark.parametrize("n", [2, 3])
def test_any_tensors_arrive(grade: Grade, n: int) -> None:
    run = grade.run(b.pass_around, n, options=uneven(grade.random, n), if_stuck=SENDS_STUCK)
    _check_arrived(run.results)
    if grade.is_simulated:
        check_no_collective(run, "tensors should travel in messages")
        check_waited(run)
        sent = [[x.nbytes for x in tensors] for tensors in b.lists_of(0)]
        _check_messages(f"rank 0 to rank 1, in {len(sent)} calls", _sizes_sent(run, 0, 1), sent)


def _check_arrived(by_rank: Sequence[Any]) -> None:
    for rank, result in enumerate(by_rank):
        check(all(result["unchanged"]), f"rank {rank}: send_tensors changed what it was given.")
        src = (rank - 1) % len(by_rank)
        here = f"rank {rank} of {len(by_rank)}, from rank {src}"
        for wanted, got in zip(b.descriptions_from(src), result["arrived"], strict=True):
            kinds = [f"{x['dtype']} {tuple(x['shape'])}" for x in wanted]
            expect(f"{here}: the number of tensors, {short(kinds)},", len(got), len(wanted))
            for kind, expected, found in zip(kinds, wanted, got, strict=True):
                for name, cause in CAUSES.items():
                    what = f"{here}: of a tensor that was sent as {kind}, {name}"
                    expect(what, found[name], expected[name], cause)


def _sizes_sent(run: Run, src: int, dst: int) -> list[int]:
    """Return the bytes of each message from one rank to another, in the order of sending.

    Messages may arrive in a different order, since a short one can overtake a long one.
    """
    pairs = run.trace.pairs() if run.trace else []
    sends = [send for send, recv in pairs if (send.rank, recv.rank) == (src, dst)]
    return [send.num_bytes for send in sorted(sends, key=lambda send: send.message)]


def _check_messages(here: str, found: Sequence[int], sent: Sequence[Sequence[int]]) -> None:
    """Check the messages of several calls of ``send_tensors`` from one rank to another.

    Args:
        here: Both ranks in words, to begin an error text with.
        found: The bytes of each message, in the order of sending.
        sent: For each call, the bytes of the tensors that it should send, in order.
    """
    expected = Counter(size for sizes in sent for size in sizes)
    missing, more = expected - Counter(found), Counter(found) - expected
    allowed = sum(HEADER_BYTES + MORE_BYTES * max(0, len(sizes) - 4) for sizes in sent)
    tensors = f"{here}: tensors of {short(sorted(expected.elements()))} bytes should be sent, each"
    check(
        not missing,
        f"{tensors} in a message of its own and in its own dtype; messages of "
        f"{short(sorted(missing))} bytes are missing. There are messages of "
        f"{short(sorted(found))} bytes.",
    )
    check_cost(
        more.total() <= HEADER * len(sent) and sum(more.elements()) <= allowed,
        f"{tensors} once and only if it is needed there, after a header of at most {HEADER} "
        f"messages, with at most {allowed:,} bytes in all headers. Yours also sends messages of "
        f"{short(sorted(more.elements()))} bytes.",
    )
    last = sent[-1][-1:] if sent else []
    if last:
        check_cost(
            found[-1:] == last,
            f"{here}: the bytes of the last message, a tensor, should be {last}; got "
            f"{found[-1:]}. Send no header where no tensor follows.",
        )


@task("2.8")
def test_messages_inside_a_group(grade: Grade) -> None:
    _check_arrived(results_in_group(grade, b.pass_around))


# Task 2.8: StageRunner

STAGES_STUCK = (
    "Each forward sends to the next rank, and each backward sends a gradient back for every tensor "
    "that requires one, and for no other: sender and receiver must agree which these are."
)
ALL_BACK = (
    "Gradients come back for all tensors that require one, add up over the steps, and come of the "
    "last forward. Give the stage what forward was given, not a copy, and keep outputs that have "
    "their graph."
)
PLANS = [ALL_TRAINED, SOME_FROZEN]
ROUNDING = 1e-6  # some values are in float32; wrong gradients differ by more


def _cuts(random: Random, n: int) -> list[int]:
    return [0, *sorted(random.sample(range(1, NUM_BLOCKS), n - 1)), NUM_BLOCKS]


@task("2.8", real=True)
def test_stages_compute_what_one_process_does(grade: Grade) -> None:
    for n in (1, 2, 8) if grade.is_simulated else (3,):
        _judge_training(grade, n)


def _judge_training(grade: Grade, n: int) -> None:
    cuts = _cuts(grade.random, n)
    run = grade.run(b.train_all, n, PLANS, cuts, if_stuck=STAGES_STUCK)
    _check_training(run.results, cuts)
    if not grade.is_simulated:
        return
    check_no_collective(run, "stages should talk to their neighbours in messages")
    check_waited(run)
    for src, dst in product(range(n), repeat=2):
        sent = [sizes for plan in PLANS for sizes in _sent(plan, cuts, src, dst)]
        way = "activations forward" if src < dst else "gradients back"
        here = f"{way}, rank {src} to rank {dst}, all steps"
        _check_messages(here, _sizes_sent(run, src, dst), sent)


@task("2.8")
def test_stages_inside_a_group(grade: Grade) -> None:
    cuts = _cuts(grade.random, len(MEMBERS))
    _check_training(results_in_group(grade, b.train_all, PLANS, cuts), cuts)


def _check_training(by_rank: Sequence[Any], cuts: Sequence[int]) -> None:
    n = len(by_rank)
    for (number, plan), rank in product(enumerate(PLANS), range(n)):
        alone, result = train_alone(plan), by_rank[rank][number]
        blocks, is_last = f"blocks {cuts[rank]} to {cuts[rank + 1] - 1}", rank == n - 1
        here = f"stage {rank} of {n}, {blocks}; frozen are {list(plan.frozen)}"
        for step, found in enumerate(result["steps"]):
            kind = " (evaluation)" if step in plan.evaluations else ""
            _check_step(f"{here}, step {step}{kind}", found, alone, step, rank, is_last)
        for name, got in result["state"].items():
            expect(f"{here}, after all steps: {name}", got, alone.state[name], ALL_BACK, ROUNDING)


def _check_step(here: str, found: Any, alone: b.Alone, step: int, rank: int, is_last: bool) -> None:
    if is_last:
        what = "the loss and the outputs; if not in step 0, gradients of an earlier one were wrong,"
        losses = found["loss"], alone.losses[step]
        outputs = found["output"], alone.outputs[step]
        pairs = ([*pair] for pair in zip(losses, outputs, strict=True))
        expect(f"{here}: {what}", *pairs, tolerance=ROUNDING)
        what = "whether the outputs require a gradient, which they never do in an evaluation pass,"
        expect(f"{here}: {what}", found["has_graph"], alone.has_graph[step])
    else:
        cause = "The last rank alone returns what its stage returns."
        expect(f"{here}: what forward returns", found["output"], b.kind_of(None), cause)
    wanted = alone.input_gradients[step] if rank == 0 else None
    what = "the gradient of the input that requires one"
    expect(f"{here}: {what}", found["input_gradient"], wanted, ALL_BACK, ROUNDING)


def _sent(plan: Plan, cuts: Sequence[int], src: int, dst: int) -> list[list[int]]:
    """Return, for each call, the bytes of the tensors that one rank should send to another."""
    if abs(src - dst) != 1:
        return []
    border = [step[cuts[max(src, dst)] - 1] for step in train_alone(plan).passed]
    if src < dst:
        return [[size for size, _ in tensors] for tensors in border]
    backward = [border[step] for step in range(plan.num_steps) if step not in plan.evaluations]
    needed = [[size for size, requires_grad in tensors if requires_grad] for tensors in backward]
    return [sizes for sizes in needed if sizes]


@task("2.8")
def test_no_tensor_is_kept_for_the_next_step(grade: Grade) -> None:
    one, four = (grade.run(b.train_long, 3, steps, options=MEASURED) for steps in (1, 4))
    for rank, found in enumerate(four.results):
        expect(
            f"rank {rank} of 3: what forward returns, where each stage returns a Tensor and a "
            "tuple of one in turn,",
            found,
            ["a Tensor", "a tuple"] * 2 if rank == 2 else [b.kind_of(None)] * 4,
            "The last rank returns what its stage returns, and the others None.",
        )
        first, all_steps = one.peak_bytes[rank], four.peak_bytes[rank]
        check_cost(
            all_steps <= first,
            f"rank {rank} of 3 held at most {first:,} bytes in its first step, and {all_steps:,} "
            "in a later one. Drop what backward needed as soon as it has run: an output that is "
            "kept keeps the graph behind it.",
        )
