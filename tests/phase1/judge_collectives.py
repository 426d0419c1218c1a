"""Judges tasks 1.4 to 1.7: sums, rounds, bytes and groups."""

from math import ceil, floor, log2
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from phase1 import collectives as c
from phase1.groups import OUTER_WORLD_SIZE, inside_group
from phase1.judging import (
    UNIFORM,
    of_members,
    rounds_of,
    short,
)

BYTES = 4 * c.NUM_ELEMENTS

# 1.4 exchange


@task("1.4", real=True)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_ring_exchanges_without_deadlock(grade: Grade, n: int) -> None:
    for step in (1, -1):
        _check_exchanged(grade.run(c.exchange_round_the_ring, n, step).results, step)


def _check_exchanged(by_rank: list[Any], step: int) -> None:
    n = len(by_rank)
    for rank, held in enumerate(by_rank):
        src, sent = (rank - step) % n, [float(rank)] * (rank + 1)
        check(
            held["incoming"] == [float(src)] * (src + 1),
            f"rank {rank} of {n} receives from rank {src}: incoming should be "
            f"{[float(src)] * (src + 1)}, it is {held['incoming']}. Is dst whom you send to, src "
            "whom you receive from, and is the receive waited for?",
        )
        check(
            held["outgoing"] == sent,
            f"rank {rank} of {n} sent {sent}, and afterwards its outgoing is {held['outgoing']}. "
            "It belongs to the caller, who may need it again: only incoming is written.",
        )


@task("1.4")
def test_both_directions_travel_at_the_same_time(grade: Grade) -> None:
    for n in (2, 5, 8):
        run = grade.run(c.exchange_much, n, cluster=UNIFORM)
        rounds = rounds_of(run, BYTES)
        check(
            rounds <= 1.01,
            f"{n} ranks: an exchange should take the time of 1 message, it takes {rounds}. Post "
            "send and receive before you wait for either.",
        )
        check(
            run.messages == [1] * n and run.collectives == [0] * n,
            f"each rank should send 1 message and call no collective; it sends {run.messages}.",
        )


@task("1.4")
def test_outgoing_may_be_written_afterwards(grade: Grade) -> None:
    results = grade.run(c.exchange_then_write, 3).results
    check(
        results == [2.0, 0.0, 1.0],
        f"the caller wrote outgoing after exchange had returned, and the receivers got {results} "
        "where [2.0, 0.0, 1.0] had been sent. Wait for the send as well.",
    )


@task("1.4")
def test_exchange_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, c.exchange_round_the_ring, 1)
    _check_exchanged(of_members(run), 1)


# 1.5 broadcast


@task("1.5")
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_broadcast_takes_logarithmically_many_rounds(grade: Grade, n: int) -> None:
    src, most = n // 2, ceil(log2(n))
    run = grade.run(c.broadcast_from, n, src, cluster=UNIFORM)
    _check_holds_src(run, src)
    check(
        run.collectives == [0] * n,
        "broadcast should be made of send and recv; yours calls a built-in collective.",
    )
    rounds = rounds_of(run, BYTES)
    check(
        rounds <= most + 0.01 and max(run.messages) <= most,
        f"{n} ranks need {most} rounds and at most {most} messages from one rank; yours takes "
        f"{rounds} rounds, messages by rank are {run.messages}. Whoever has the data passes it on.",
    )
    check(
        sum(run.messages) == n - 1,
        f"{n} ranks need {n - 1} messages, one for each that lacks the data; "
        f"yours sends {run.messages} by rank.",
    )
    sent = int(sum(run.bytes_sent))
    check(
        sent == (n - 1) * BYTES,
        f"{n} ranks need {(n - 1) * BYTES} bytes in all, {BYTES} in each message; yours sends "
        f"{sent}. Send x as it is, in its own dtype.",
    )


def _check_holds_src(run: Run, src: int) -> None:
    n = len(run.results)
    for rank, got in enumerate(run.results):
        check(
            got == float(src),
            f"rank {rank} of {n} holds {got}, src = {src} had {src}.0. Place ranks by their "
            "distance from src, round the end.",
        )


@task("1.5", real=True)
def test_broadcast_from_every_rank_of_every_kind(grade: Grade) -> None:
    for n in (3, 4):
        _check_broadcast(grade.run(c.broadcast_all_kinds, n).results)


def _check_broadcast(by_rank: list[Any]) -> None:
    n = len(by_rank)
    for src in range(n):
        expected = c.plain(c.tensors_of(src))
        for rank in range(n):
            for kind, wanted, got in zip(c.KINDS, expected, by_rank[rank][src], strict=True):
                check(
                    got == wanted,
                    f"rank {rank} of {n}, src {src}, {kind[1]} of shape {kind[0]}: should be "
                    f"{short(wanted)}, is {short(got)}. Write into x itself, and keep its "
                    "dtype on the way: a cast loses digits.",
                )


@task("1.5")
def test_broadcast_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, c.broadcast_all_kinds)
    _check_broadcast(of_members(run))


# 1.6 all_reduce_naive


@task("1.6")
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_naive_sum_passes_through_rank_0(grade: Grade, n: int) -> None:
    run = grade.run(c.reduce_my_rank, n, "all_reduce_naive", cluster=UNIFORM)
    _check_sums_of_powers(run.results)
    _check_no_collective(run)
    received = [int(number) // BYTES for number in run.bytes_received]
    expected = [n - 1] + [1] * (n - 1)
    check(
        received == expected and sum(run.messages) == 2 * (n - 1),
        f"{n} ranks: rank 0 should receive {n - 1} tensors and every other rank 1, the sum; "
        f"received are {received}, sent {run.messages}.",
    )
    most, rounds = ceil(log2(n)), rounds_of(run, BYTES)
    check(
        run.messages[0] <= most and rounds <= n - 1 + most + 0.01,
        f"{n} ranks: rank 0 should take {n - 1} rounds to add up and {most} to give the sum to all "
        f"by your broadcast; yours takes {rounds} rounds, and rank 0 sends {run.messages[0]} "
        f"messages where {most} would do. Ranks that have the sum pass it on.",
    )


def _check_sums_of_powers(by_rank: list[Any]) -> None:
    n = len(by_rank)
    total = float(2**n - 1)
    for rank, (least, greatest) in enumerate(by_rank):
        seen = f"{least}" if least == greatest else f"between {least} and {greatest}"
        check(
            least == greatest == total,
            f"rank {rank} of {n}: rank r holds 2^r, so the sum is {total}; x is {seen}. Is every "
            "rank's number added once, and given to all?",
        )


def _check_no_collective(run: Run) -> None:
    check(
        not any(run.collectives),
        "this all-reduce should be made of messages (send, recv, your exchange and broadcast); "
        "yours calls a built-in collective.",
    )


@task("1.6", real=True)
def test_naive_sums_every_kind(grade: Grade) -> None:
    _check_sums(grade.run(c.reduce_all_kinds, 3, "all_reduce_naive").results)


def _check_sums(by_rank: list[Any]) -> None:
    parts = [c.tensors_of(rank) for rank in range(len(by_rank))]
    sums = c.plain([sum(tensors[1:], tensors[0]) for tensors in zip(*parts, strict=True)])
    for rank, tensors in enumerate(by_rank):
        for kind, wanted, got in zip(c.KINDS, sums, tensors, strict=True):
            check(
                got == wanted,
                f"rank {rank} of {len(by_rank)}, {kind[1]} of shape {kind[0]}: the sum should be "
                f"{short(wanted)}, it is {short(got)}. Is x itself the sum on return? A cast on "
                "the way loses digits: send x's own dtype.",
            )


@task("1.6")
def test_naive_gives_all_ranks_the_same_bits(grade: Grade) -> None:
    _check_same_bits(grade.run(c.reduce_fractions, 5, "all_reduce_naive").results)


def _check_same_bits(by_rank: list[Any]) -> None:
    for rank, got in enumerate(by_rank):
        check(
            len(got) == c.NUM_ELEMENTS,
            f"rank {rank} of {len(by_rank)}: x had {c.NUM_ELEMENTS} elements, it has {len(got)}.",
        )
        where = [i for i, (a, b) in enumerate(zip(by_rank[0], got, strict=True)) if a != b]
        check(
            not where,
            f"rank {rank} of {len(by_rank)} differs from rank 0 at {len(where)} of {len(got)} "
            "elements, in the last bits or more. Ranks that add in different orders round "
            "differently, and their models drift apart.",
        )


@task("1.6")
def test_naive_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, c.reduce_all_kinds, "all_reduce_naive")
    _check_sums(of_members(run))


# 1.7 all_reduce_recursive_doubling

DOUBLING = "all_reduce_recursive_doubling"


@task("1.7")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 8])
def test_doubling_takes_logarithmically_many_rounds(grade: Grade, n: int) -> None:
    run = grade.run(c.reduce_my_rank, n, DOUBLING, cluster=UNIFORM)
    _check_sums_of_powers(run.results)
    _check_no_collective(run)
    doublings, rounds = floor(log2(n)), rounds_of(run, BYTES)
    core = 2**doublings
    extra = 0 if core == n else 2
    check(
        rounds <= doublings + extra + 0.01,
        f"{n} ranks should take {doublings + extra} rounds, yours takes {rounds}. Partners are at "
        "distance 1, 2, 4, … and swap at the same time.",
    )
    expected = core * doublings + 2 * (n - core)
    check(
        sum(run.messages) == expected and (extra or run.messages == [doublings] * n),
        f"{n} ranks should send {expected} messages in all; yours sends {run.messages} by rank.",
    )
    check(
        sum(run.bytes_sent) == expected * BYTES,
        f"{n} ranks should send {expected * BYTES} bytes in all, {BYTES} in each message; yours "
        f"sends {short(run.bytes_sent)}.",
    )


@task("1.7", real=True)
def test_doubling_sums_every_kind(grade: Grade) -> None:
    _check_sums(grade.run(c.reduce_all_kinds, 5, DOUBLING).results)


@task("1.7")
@pytest.mark.parametrize("n", [4, 7])
def test_doubling_gives_all_ranks_the_same_bits(grade: Grade, n: int) -> None:
    _check_same_bits(grade.run(c.reduce_fractions, n, DOUBLING).results)


@task("1.7")
def test_doubling_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, c.reduce_all_kinds, DOUBLING)
    _check_sums(of_members(run))
