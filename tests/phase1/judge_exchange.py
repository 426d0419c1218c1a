"""Judges task 1.4: what arrives, whether it hangs, and what it costs."""

from collections import Counter
from collections.abc import Sequence
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
    check_no_collective,
    check_sizes,
    check_waited,
    of_members,
    short,
    uneven,
)
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase1 import collectives as c

NOT_BATCHED = (
    "Are the send and the receive in one batch_isend_irecv? Otherwise one may wait for the other; "
    "on NCCL, a separate isend and irecv with the same rank wait for each other too."
)


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
    """Whether all ranks send equally far."""
    return len({(dst - rank) % len(dsts) for rank, dst in enumerate(dsts)}) == 1


def _check_exchanges(grade: Grade, dsts: list[int], *, are_alike: bool) -> None:
    run = grade.run(
        *(c.exchange_all_kinds, len(dsts), dsts, are_alike),
        options=uneven(grade.random, len(dsts), AS_NCCL),
        if_stuck=NOT_BATCHED,
    )
    _check_exchanged(run.results, dsts)
    if grade.is_simulated:
        _check_one_message_each(run, len(t.KINDS))
        check_sizes(
            run,
            {
                size: n * len(dsts)
                for size, n in Counter(kind.num_bytes for kind in t.KINDS).items()
            },
        )
        check_waited(run)


def _check_exchanged(by_rank: list[Any], dsts: Sequence[int]) -> None:
    for rank, held in enumerate(by_rank):
        src = dsts.index(rank)
        where = f"rank {rank} of {len(dsts)}, which receives from rank {src}"
        sent = _brought(rank)
        came = _brought(src)
        for kind, wanted, got in zip(t.KINDS, came, held["incoming"], strict=True):
            check(
                got == wanted,
                f"{where}, {kind}: incoming should be {short(wanted)}, but "
                f"is {short(got)}. {_why_not(got, _brought(dsts[rank]))}",
            )
        for kind, wanted, got in zip(t.KINDS, sent, held["outgoing"], strict=True):
            check(
                got == wanted,
                f"rank {rank} of {len(dsts)} sent {short(wanted)}, {kind}, "
                f"but afterwards its outgoing is {short(got)}. outgoing belongs to the caller, who "
                "may need it again: write into incoming only.",
            )


def _brought(rank: int) -> list[Any]:
    return t.plain([t.exact(kind, rank) for kind in t.KINDS])


def _why_not(got: Any, of_dst: list[Any]) -> str:
    """Say why something else may have arrived."""
    if got in of_dst:
        return "That is rank dst's tensor: send to dst, and receive from src."
    return (
        "Do you send to dst and receive from src? Do you wait for the receive, and receive into "
        "incoming itself, in its own dtype?"
    )


def _check_one_message_each(run: Run, num_calls: int = 1) -> None:
    check_no_collective(run, "an exchange is one message from each rank and nothing else")
    check(
        all(messages == num_calls for messages in run.messages),
        f"each rank should send {counted(num_calls, 'message')} in "
        f"{counted(num_calls, 'exchange')}; messages sent per rank: {run.messages}. The receiver "
        "knows shape and dtype: send nothing but the tensor.",
    )


@task("1.4")
@pytest.mark.parametrize("n", [2, 5, 8])
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
    run = grade.run(c.exchange_then_write, 3, if_stuck=NOT_BATCHED)
    at_once, later = ([held[i] for held in run.results] for i in (0, 1))
    check(
        later == [2.0, 0.0, 1.0],
        f"the caller overwrote outgoing after exchange had returned, and the receivers got {later} "
        "although [2.0, 0.0, 1.0] had been sent. Wait for the send as well.",
    )
    check(
        at_once == [2.0, 0.0, 1.0],
        "when exchange returns, incoming on ranks 0, 1 and 2 should hold [2.0, 0.0, 1.0], even if "
        f"one rank is late; it holds {at_once}, and only later {later}. Wait for the receive as "
        "well.",
    )
    check_waited(run)


@task("1.4")
def test_exchange_inside_a_group(grade: Grade) -> None:
    n = len(MEMBERS)
    ring = [(rank + 1) % n for rank in range(n)]
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, c.exchange_all_kinds, ring, True),
        options=AS_NCCL,
        if_stuck=STUCK_IN_GROUP,
    )
    _check_exchanged(of_members(run), ring)
