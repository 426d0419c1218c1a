"""Judges tasks 1.4 to 1.7: messages that arrive, who sends to whom, rounds and memory."""

from collections import Counter
from collections.abc import Sequence
from math import ceil, floor, log2
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted
from judging import tensors as t
from judging.checks import (
    AS_NCCL,
    BYTE_S,
    LATENCY_S,
    UNIFORM,
    Edge,
    check_no_collective,
    check_sizes,
    check_waited,
    edges_of,
    of_members,
    rounds_of_tree,
    uneven,
)
from judging.collective import AllReduce, Broadcast, Call, Contract
from judging.expect import expect
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from judging.tensors import even_size
from phase1 import collectives as c

NOT_BATCHED = (
    "Are the send and the receive in one batch_isend_irecv? Otherwise one may wait for the other; "
    "on NCCL, a separate isend and irecv with the same rank wait for each other too."
)

WRONG_RANK = (
    "Do you send to dst and receive from src? Do you wait for the receive, and receive into "
    "incoming itself, in its own dtype?"
)
OF_THE_CALLER = "outgoing belongs to the caller, who may need it again: write into incoming only."


@task("1.4", real=True)
@pytest.mark.parametrize("n", [2, 5])
def test_a_ring_exchanges_without_deadlock(grade: Grade, n: int) -> None:
    for step in {1, n - 1}:
        ring = [(rank + step) % n for rank in range(n)]
        _check_exchanges(grade, ring, are_alike=True)


@task("1.4")
def test_pairs_exchange_without_deadlock_where_order_matters(grade: Grade) -> None:
    _check_exchanges(grade, [1, 0, 3, 2], are_alike=False)


@task("1.4")
def test_ranks_exchange_with_whom_they_are_told(grade: Grade) -> None:
    dsts = list(range(5))
    while any(dst == rank for rank, dst in enumerate(dsts)) or _is_ring(dsts):
        grade.random.shuffle(dsts)
    _check_exchanges(grade, dsts, are_alike=False)


def _is_ring(dsts: Sequence[int]) -> bool:
    """True if all ranks send equally far."""
    return len({(dst - rank) % len(dsts) for rank, dst in enumerate(dsts)}) == 1


def _check_exchanges(grade: Grade, dsts: list[int], *, are_alike: bool) -> None:
    n = len(dsts)
    run = grade.run(
        *(c.exchange_all_kinds, n, dsts, are_alike),
        options=uneven(grade.random, n, AS_NCCL),
        if_stuck=NOT_BATCHED,
    )
    _check_exchanged(run.results, dsts)
    if grade.is_simulated:
        _check_one_message_each(run, len(t.KINDS))
        sizes = Counter(kind.num_bytes for kind in t.KINDS)
        check_sizes(run, {size: count * n for size, count in sizes.items()})
        check_waited(run)


def _check_exchanged(by_rank: list[Any], dsts: Sequence[int]) -> None:
    for rank, held in enumerate(by_rank):
        src = dsts.index(rank)
        here = f"rank {rank} of {len(dsts)}, which receives from rank {src}"
        brought = [t.plain([t.exact(kind, r) for kind in t.KINDS]) for r in (src, rank)]
        for kind, wanted, got in zip(t.KINDS, brought[0], held["incoming"], strict=True):
            expect(f"{here}, {kind}: incoming", got, wanted, WRONG_RANK)
        for kind, wanted, got in zip(t.KINDS, brought[1], held["outgoing"], strict=True):
            expect(f"{here}, {kind}: outgoing after the call", got, wanted, OF_THE_CALLER)


def _check_one_message_each(run: Run, num_calls: int = 1) -> None:
    check_no_collective(run, "an exchange is one message from each rank and nothing else")
    expect(
        f"the messages sent per rank in {counted(num_calls, 'exchange')}",
        run.messages,
        [num_calls] * len(run.messages),
        "The receiver knows shape and dtype: send nothing but the tensor.",
    )


@task("1.4")
@pytest.mark.parametrize("n", [2, 5])
def test_both_directions_travel_at_the_same_time(grade: Grade, n: int) -> None:
    lengths = [grade.random.randrange(5_000, 50_000) for _ in range(n)]
    lengths[0] = grade.random.randrange(*t.LARGE)
    ring = [(rank + 1) % n for rank in range(n)]
    run = grade.run(c.exchange_once, n, ring, lengths, cluster=UNIFORM, if_stuck=NOT_BATCHED)
    _check_one_message_each(run)
    expected = LATENCY_S + 4 * max(lengths) * BYTE_S
    check(
        run.seconds <= 1.001 * expected,
        f"an exchange in which {n} ranks send {lengths} float32 numbers at the same time should "
        f"take {expected * 1e6:.2f} µs, the time of the longest message; yours takes "
        f"{run.seconds * 1e6:.2f} µs. Put the send and the receive into one batch, and wait for "
        "both afterwards.",
    )


@task("1.4")
def test_outgoing_may_be_written_afterwards(grade: Grade) -> None:
    run, sent = grade.run(c.exchange_then_write, 3, if_stuck=NOT_BATCHED), [2.0, 0.0, 1.0]
    for place, when, cause in (
        (1, "once the caller has overwritten outgoing", "Wait for the send as well."),
        (0, "when exchange returns, even if one rank is late", "Wait for the receive as well."),
    ):
        expect(f"incoming by rank, {when},", [held[place] for held in run.results], sent, cause)
    check_waited(run)


@task("1.4")
def test_exchange_inside_a_group(grade: Grade) -> None:
    ring = [1, 2, 0]
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, c.exchange_all_kinds, ring, True),
        options=AS_NCCL,
        if_stuck=STUCK_IN_GROUP,
    )
    _check_exchanged(of_members(run), ring)


OF_MESSAGES = "this all-reduce should be made of messages (send, recv, your exchange and broadcast)"
AT_ONCE = 30  # elements: so few that several messages started at once take as long as one

# 1.5 broadcast


def _check_tree(call: Call) -> None:
    n, src, edges = call.n, call.variant.src, edges_of(call.run)
    check(
        len(edges) == n - 1,
        f"a broadcast on {counted(n, 'rank')} needs {counted(n - 1, 'message')}, one for each rank "
        f"that lacks the data; messages sent per rank, with src = {src}: {call.run.messages}.",
    )
    most, rounds = ceil(log2(n)), rounds_of_tree(edges, src)
    check(
        max(call.run.messages) <= most and rounds <= most,
        f"a broadcast on {counted(n, 'rank')} needs {counted(most, 'round')}, in which no rank "
        f"sends more than {counted(most, 'message')}; with src = {src}, yours takes {rounds:g}. "
        f"Messages sent per rank: {call.run.messages}. Every rank that has the data passes it on.",
    )


BROADCAST = Contract(
    task="1.5",
    name="broadcast",
    collective=Broadcast(
        "broadcast",
        advice="Number the ranks by their distance from src, wrapping around; write into x itself, "
        "and send it in its own dtype: a cast loses digits.",
    ),
    worlds=(2, 3, 5, 7, 8, 16, 1),
    length=lambda random: random.randrange(1, AT_ONCE),
    made_of="broadcast should be made of send and recv",
    traffic=_check_tree,
    messages=lambda num_elements, n: Counter({num_elements: n - 1}),
    rounds=lambda n: ceil(log2(n)),
    late="Every rank that has the data passes it on, and sends first to the rank that must pass it "
    "on to the most others.",
    timed_up_to=AT_ONCE,
    inboxes=lambda _rank: 0,
    memory="Send and receive x itself: no copy or second tensor is needed.",
    kinds_on=(3,),
)
globals().update(BROADCAST.tests())


@task("1.5")
def test_two_broadcasts_do_not_mix(grade: Grade) -> None:
    for srcs in ([0, 3], [0, 5]):
        for rank, got in enumerate(grade.run(c.broadcast_twice, 8, 2, srcs).results):
            expect(
                f"rank {rank} of 8: what two broadcasts bring, one after the other, from ranks "
                f"{srcs[0]} and {srcs[1]} while rank 2 is late,",
                got,
                [float(srcs[0]), 10.0 + srcs[1]],
                "Name the rank that you receive from: without group_src=, recv accepts any "
                "message, even one from the next broadcast.",
            )


# 1.6 all_reduce_naive


def _check_through_rank_0(call: Call) -> None:
    n, edges = call.n, edges_of(call.run)
    here, up = f"on {counted(n, 'rank')}", [src for src, dst in edges if dst == 0]
    down = [edge for edge in edges if edge[1] != 0]
    expect(f"{here}: the ranks that rank 0 receives from, once each,", up, [*range(1, n)])
    expect(
        f"{here}: the ranks that receive one message, the sum,",
        sorted(dst for _, dst in down),
        [*range(1, n)],
    )
    most, rounds = ceil(log2(n)), rounds_of_tree(down, 0)
    check(
        call.run.messages[0] <= most and rounds <= most,
        f"{here}, adding up on rank 0 should take {counted(n - 1, 'round')}, and broadcasting the "
        f"sum {most} more; yours takes {n - 1 + rounds} in all. Rank 0 should send at most "
        f"{counted(most, 'message')}; it sends {call.run.messages[0]:,}. Send the sum with your "
        "broadcast, in which every rank that has the sum passes it on.",
    )


NAIVE = Contract(
    task="1.6",
    name="naive",
    collective=AllReduce("all_reduce_naive"),
    worlds=(2, 3, 5, 8, 16, 1),
    length=lambda random: random.randrange(1, AT_ONCE),
    made_of=OF_MESSAGES,
    traffic=_check_through_rank_0,
    messages=lambda num_elements, n: Counter({num_elements: 2 * (n - 1)}),
    rounds=lambda n: n - 1 + ceil(log2(n)),
    late="Rank 0 receives one message after another, and sends the sum with your broadcast.",
    timed_up_to=AT_ONCE,
    inboxes=lambda rank: int(rank == 0),
    memory="Rank 0 needs x and one tensor to receive into, which it can reuse for every message; "
    "the others need x alone. Add in place: x += …",
    kinds_on=(3,),
)
globals().update(NAIVE.tests())

# 1.7 all_reduce_recursive_doubling


def _check_partners(call: Call) -> None:
    n, core, edges = call.n, _core(call.n), edges_of(call.run)
    handed = f" Each rank r ≥ {core} hands x over to rank r - {core}, and gets the sum back."
    for rank in range(n):
        wanted, got = (
            [dst for src, dst in each if src == rank] for each in (_edges_of_doubling(n), edges)
        )
        expect(
            f"rank {rank} of {n}: the ranks that it sends to, one message each,",
            got,
            wanted,
            f"Among the first {core} ranks, the numbers of two partners differ in one bit."
            f"{handed * (n > core)}",
        )


def _core(n: int) -> int:
    """Return P, the largest power of two up to n."""
    return 1 << (n.bit_length() - 1)


def _edges_of_doubling(n: int) -> list[Edge]:
    core = _core(n)
    swaps = [(rank, rank ^ 1 << k) for rank in range(core) for k in range(core.bit_length() - 1)]
    handed = [(rank, rank - core) for rank in range(core, n)]
    return sorted([*swaps, *handed, *((dst, src) for src, dst in handed)])


DOUBLING = Contract(
    task="1.7",
    name="doubling",
    collective=AllReduce("all_reduce_recursive_doubling"),
    worlds=(2, 3, 4, 5, 7, 16, 1),
    length=lambda random: even_size(random, 1000, 9000) + random.randrange(2),
    made_of=OF_MESSAGES,
    traffic=_check_partners,
    messages=lambda num_elements, n: Counter({num_elements: len(_edges_of_doubling(n))}),
    rounds=lambda n: floor(log2(n)) + (0 if n == _core(n) else 2),
    late="Partners are at distance 1, 2, 4, … and swap their sums at the same time.",
    inboxes=lambda _rank: 1,
    memory="A rank needs x and one tensor to receive into, which it can reuse in every round. Add "
    "in place: x += …",
    kinds_on=(5,),
    bits_on=(4, 7),
)
globals().update(DOUBLING.tests())
