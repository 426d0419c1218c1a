"""Judges tasks 1.3 to 1.7: results, the messages between ranks, rounds and memory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, floor, log2
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, check_cost, task
from distlab.util.text import counted
from judging import tensors as t
from judging.checks import (
    AS_NCCL,
    BYTE_S,
    LATENCY_S,
    MEASURED,
    ON_CPU,
    UNIFORM,
    Edge,
    check_no_collective,
    check_peak,
    check_refused,
    check_sizes,
    check_waited,
    edges_of,
    exceeds,
    of_members,
    rounds_of_tree,
    short,
    uneven,
)
from judging.collective import AllReduce, Broadcast, Call, Contract
from judging.expect import expect, expect_cost, expect_on_all_ranks
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from judging.tensors import even_size
from phase1 import collectives as b

HEADER_BYTES, HEADER_CALLS = 1_000, 2  # broadcast_object_list makes two calls: length, object
ONLY_SOURCE_RAISES = (
    "An error that only the source raises leaves the others waiting: send it in place of the "
    "shapes, so that every rank raises it."
)
KINDS = [  # number of ranks, source, kind of batch
    (4, 0, b.Kind(10)),
    (5, 1, b.Kind(3, "float64", (2, 250), "float32", (3,))),
]
MORE_KINDS = [
    (4, 3, b.Kind(150, "float32", (2, 251), "bool")),
    (3, 1, b.Kind(8, "float16", (3, 4), "int16", (2,), is_strided=True)),
    (2, 1, b.Kind(1, "bfloat16", (3, 1, 2), "float64")),
    (3, 0, b.Kind(0)),
    (1, 0, b.Kind(4)),
    (4, None, b.Kind(9, "uint8", (3, 4), "int32")),
]


@task("1.5", real=True)
@pytest.mark.parametrize(("n", "src", "kind"), KINDS, ids=str)
def test_every_rank_gets_its_rows(grade: Grade, n: int, src: int, kind: b.Kind) -> None:
    _check_kind(grade, n, src, kind)


@task("1.5")
@pytest.mark.parametrize(("n", "src", "kind"), MORE_KINDS, ids=str)
def test_any_shapes_and_dtypes_arrive(grade: Grade, n: int, src: int | None, kind: b.Kind) -> None:
    _check_kind(grade, n, src, kind)


def _check_kind(grade: Grade, n: int, src: int | None, kind: b.Kind) -> None:
    kind = replace(kind, seed=grade.random.randrange(10**6))
    run = grade.run(b.scatter, n, kind, src)
    _check_scattered(run.results, kind, src or 0)
    if grade.is_simulated:
        _check_traffic(run, kind, src or 0, range(n))


def _check_scattered(by_rank: Sequence[Any], kind: b.Kind, src: int) -> None:
    n = len(by_rank)
    batch = dict(zip(("images", "labels"), kind.batch(), strict=True))
    for rank, found in enumerate(by_rank):
        here = f"rank {rank} of {n}"
        expect(f"{here}: the type that scatter_batch returns", found["type"], "tuple")
        rows = _rows_of(kind.rows, n, rank)
        for what, whole in batch.items():
            _check_part(found[what], whole[rows.start : rows.stop], f"{here}: {what}", rows)
        check(
            rank != src or all(found["is_view"]),
            f"{here} is the source: its rows should be views of the batch, but they are copies in "
            "other memory. Slices and tensor_split copy nothing.",
        )


def _rows_of(rows: int, n: int, rank: int) -> range:
    """Return the rows of a rank: 4 ranks share 10 rows as 3, 3, 2 and 2."""
    starts = [k * (rows // n) + min(k, rows % n) for k in (rank, rank + 1)]
    return range(*starts)


def _check_part(found: Any, expected: Any, here: str, rows: range) -> None:
    shape, dtype, device, numbers = found
    expect(
        f"{here}, by shape, dtype and device,",
        [shape, dtype, device],
        [list(expected.shape), str(expected.dtype), "cpu"],
        "4 ranks share 10 rows as 3, 3, 2 and 2; every rank learns dtypes and shapes from the "
        "source.",
    )
    check(
        numbers == b.bytes_of(expected),
        f"{here} should be rows {[*rows]} of the batch, bit for bit, but other numbers arrived. Of "
        "10 rows, 4 ranks get rows 0-2, 3-5, 6-7 and 8-9, whatever the dtype, and even if the "
        "batch is not contiguous.",
    )


def _check_traffic(run: Run, kind: b.Kind, src: int, members: Sequence[int]) -> None:
    """Check that each rank that gets rows is sent one header and two messages, and nothing else."""
    assert run.trace
    row_bytes = [t[:1].nbytes for t in replace(kind, rows=1, is_strided=False).batch()]
    sends = [event for event in run.trace.events if event.kind == "send"]
    for rank, member in enumerate(members):
        rows = len(_rows_of(kind.rows, len(members), rank)) if rank != src else 0
        wanted = [rows * num_bytes for num_bytes in row_bytes] if rows else []
        got = [e.num_bytes for e in sends if (e.rank, e.peer) == (members[src], member)]
        judge = check_cost if exceeds(got, wanted) else check
        judge(
            Counter(got) == Counter(wanted),
            f"the source should send messages of {short(wanted)} bytes to rank {rank} of "
            f"{len(members)}, which gets {counted(rows, 'row')} from it; it sends messages of "
            f"{short(got)} bytes. Send images and labels in one message each, in their own dtype, "
            "and every row to one rank only; zero rows, and those that the source keeps, need no "
            "message.",
        )
    others = sorted({(e.rank, e.peer) for e in sends if e.rank != members[src]})
    expect_cost("the messages of ranks other than the source, as (from, to),", others, [])
    _check_header(run, members)
    check_waited(run)


def _check_header(run: Run, members: Sequence[int]) -> None:
    assert run.trace
    calls = [event for event in run.trace.events if event.kind == "collective"]
    for rank, member in enumerate(members):
        mine = [event for event in calls if event.rank == member]
        num_bytes = sum(event.num_bytes for event in mine)
        names = Counter(event.name for event in mine)
        check_cost(
            names.total() <= HEADER_CALLS and not names.keys() - {"broadcast"},
            f"rank {rank} of {len(members)}: one broadcast_object_list for the shapes makes "
            f"{HEADER_CALLS} collective calls; this rank called {dict(names)}. One list can hold "
            "everything that the other ranks must know.",
        )
        check_cost(
            num_bytes < HEADER_BYTES,
            f"rank {rank} of {len(members)}: shapes and dtypes take less than {HEADER_BYTES:,} "
            f"bytes; your broadcasts take {num_bytes:,}. Send every row to one rank only, and "
            "broadcast only shapes and dtypes.",
        )


@task("1.5")
def test_nobody_holds_more_than_it_needs(grade: Grade) -> None:
    n, src, rows = 4, 1, grade.random.randint(100, 200)
    kind = b.Kind(rows, "float32", (10, 25), "int64")
    run = grade.run(b.scatter, n, kind, src, options=MEASURED)
    _check_scattered(run.results, kind, src)
    row_bytes = 10 * 25 * 4 + 8
    needed = [
        row_bytes * (rows if rank == src else len(_rows_of(rows, n, rank))) + 2 * HEADER_BYTES
        for rank in range(n)
    ]
    check_peak(
        run,
        needed,
        f"It needs its rows (rank {src}: the whole batch) and the shapes: send contiguous rows "
        "without copying them, and receive rows into the tensors that you return.",
    )


@task("1.5")
@pytest.mark.parametrize("what", b.WRONG_BATCHES)
def test_every_rank_hears_of_a_wrong_batch(grade: Grade, what: str) -> None:
    run = grade.run(b.scatter_what_is_wrong, 3, what, 1, if_stuck=ONLY_SOURCE_RAISES)
    check_refused(run.results, f"{what} on the source", text="same")
    _check_traffic(run, b.Kind(0), 1, range(3))
    alone = grade.run(b.scatter_what_is_wrong, 1, what, 0)
    check_refused(alone.results, f"{what} on the source")


@task("1.5")
@pytest.mark.parametrize("is_text", [False, True], ids=["device", "text"])
def test_rows_arrive_on_the_device(grade: Grade, is_text: bool) -> None:
    n, src = 3, 1
    kind = b.Kind(7, seed=grade.random.randrange(10**6))
    for rank, found in enumerate(
        grade.run(b.scatter_on_device, n, kind, src, is_text, options=ON_CPU).results
    ):
        device, rows = found["device"], _rows_of(kind.rows, n, rank)
        here = f"rank {rank} of {n}, with device={repr(device) if is_text else f'torch.{device}'}"
        expect(f"{here}: the devices of images and labels", found["devices"], [device] * 2)
        expect(
            f"{here}: the devices of the tensors that are sent or received",
            sorted({*found["travelled"][-(2 * (n - 1) if rank == src else 2) :]}),
            [device],
            "NCCL only sends tensors on GPUs.",
        )
        check(
            found["numbers"] == [b.bytes_of(t[rows.start : rows.stop]) for t in kind.batch()],
            f"{here}: rows {[*rows]} should arrive, but other numbers arrived.",
        )


@task("1.5")
@pytest.mark.parametrize(("src", "rows"), [(1, 8), (None, 4)])
def test_scattering_inside_a_group(grade: Grade, src: int | None, rows: int) -> None:
    kind = b.Kind(rows, seed=grade.random.randrange(10**6))
    args = inside_group, OUTER_WORLD_SIZE
    run = grade.run(*args, b.scatter, kind, src, if_stuck=STUCK_IN_GROUP)
    _check_scattered(of_members(run), kind, src or 0)
    _check_traffic(run, kind, src or 0, MEMBERS)
    what = "6 images and 5 labels"
    run = grade.run(*args, b.scatter_what_is_wrong, what, 1, if_stuck=ONLY_SOURCE_RAISES)
    check_refused(of_members(run), f"{what} on the source of a group", text="same")


NOT_BATCHED = (
    "Are the send and the receive in one batch_isend_irecv? Otherwise one may wait for the other; "
    "on NCCL, a separate isend and irecv with the same rank wait for each other too."
)

WRONG_RANK = (
    "Do you send to dst and receive from src? Do you wait for the receive, and receive into "
    "incoming itself, in its own dtype?"
)
OF_THE_CALLER = "outgoing belongs to the caller, who may need it again: write into incoming only."


@task("1.3", real=True)
@pytest.mark.parametrize("n", [2, 5])
def test_a_ring_exchanges_without_deadlock(grade: Grade, n: int) -> None:
    for step in {1, n - 1}:
        ring = [(rank + step) % n for rank in range(n)]
        _check_exchanges(grade, ring, are_alike=True)


@task("1.3")
def test_ranks_exchange_with_whom_they_are_told(grade: Grade) -> None:
    dsts = list(range(5))
    while any(dst == rank for rank, dst in enumerate(dsts)) or _is_ring(dsts):
        grade.random.shuffle(dsts)
    for each in [1, 0, 3, 2], dsts:
        _check_exchanges(grade, each, are_alike=False)


def _is_ring(dsts: Sequence[int]) -> bool:
    """Return whether all ranks send the same distance around a ring."""
    return len({(dst - rank) % len(dsts) for rank, dst in enumerate(dsts)}) == 1


def _check_exchanges(grade: Grade, dsts: list[int], *, are_alike: bool) -> None:
    n = len(dsts)
    run = grade.run(
        *(b.exchange_all_kinds, n, dsts, are_alike),
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
    expect_cost(
        f"the messages sent per rank in {counted(num_calls, 'exchange')}",
        run.messages,
        [num_calls] * len(run.messages),
        "The receiver knows shape and dtype: send nothing but the tensor.",
    )


@task("1.3")
@pytest.mark.parametrize("n", [2, 5])
def test_both_directions_travel_at_the_same_time(grade: Grade, n: int) -> None:
    lengths = [grade.random.randrange(5_000, 50_000) for _ in range(n)]
    lengths[0] = grade.random.randrange(*t.LARGE)
    ring = [(rank + 1) % n for rank in range(n)]
    run = grade.run(b.exchange_once, n, ring, lengths, cluster=UNIFORM, if_stuck=NOT_BATCHED)
    _check_one_message_each(run)
    expected = LATENCY_S + 4 * max(lengths) * BYTE_S
    check_cost(
        run.seconds <= 1.001 * expected,
        f"an exchange in which {n} ranks send {lengths} float32 numbers at the same time should "
        f"take {expected * 1e6:.2f} µs, the time of the longest message; yours takes "
        f"{run.seconds * 1e6:.2f} µs. Put the send and the receive into one batch, and wait for "
        "both afterwards.",
    )


@task("1.3")
def test_outgoing_may_be_written_afterwards(grade: Grade) -> None:
    run, sent = grade.run(b.exchange_then_write, 3, if_stuck=NOT_BATCHED), [2.0, 0.0, 1.0]
    for place, when, cause in (
        (1, "once the caller has overwritten outgoing", "Wait for the send as well."),
        (0, "when exchange returns, even if one rank is late", "Wait for the receive as well."),
    ):
        expect(f"incoming by rank, {when},", [held[place] for held in run.results], sent, cause)
    check_waited(run)


@task("1.3")
def test_exchange_inside_a_group(grade: Grade) -> None:
    ring = [1, 2, 0]
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.exchange_all_kinds, ring, True),
        options=AS_NCCL,
        if_stuck=STUCK_IN_GROUP,
    )
    _check_exchanged(of_members(run), ring)


OF_MESSAGES = "this all-reduce should be made of messages (send, recv, your exchange and broadcast)"
AT_ONCE = 30  # elements; several messages this short, sent together, take no longer than one

# Task 1.4: broadcast


def _check_tree(call: Call) -> None:
    n, src, edges = call.n, call.variant.src, edges_of(call.run)
    is_tree = len(edges) == n - 1
    check_cost(
        is_tree,
        f"a broadcast on {counted(n, 'rank')} needs {counted(n - 1, 'message')}, one for each rank "
        f"that lacks the data; messages sent per rank, with src = {src}: {call.run.messages}.",
    )
    if not is_tree:
        return
    most, rounds = ceil(log2(n)), rounds_of_tree(edges, src)
    check_cost(
        max(call.run.messages) <= most and rounds <= most,
        f"a broadcast on {counted(n, 'rank')} needs {counted(most, 'round')}, in which no rank "
        f"sends more than {counted(most, 'message')}; with src = {src}, yours takes {rounds:g}. "
        f"Messages sent per rank: {call.run.messages}. Every rank that has the data passes it on.",
    )


BROADCAST = Contract(
    task="1.4",
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


@task("1.4")
def test_two_broadcasts_do_not_mix(grade: Grade) -> None:
    for srcs in ([0, 3], [0, 5]):
        expect_on_all_ranks(
            f"what two broadcasts bring, one after the other, from ranks {srcs[0]} and {srcs[1]} "
            "while rank 2 is late,",
            grade.run(b.broadcast_twice, 8, 2, srcs).results,
            [float(srcs[0]), 10.0 + srcs[1]],
            "Name the rank that you receive from: without group_src=, recv accepts any message, "
            "even one from the next broadcast.",
        )


# Task 1.6: all_reduce_naive


def _check_through_rank_0(call: Call) -> None:
    n, edges = call.n, edges_of(call.run)
    here, up = f"on {counted(n, 'rank')}", [src for src, dst in edges if dst == 0]
    down = [edge for edge in edges if edge[1] != 0]
    is_more = len(edges) > 2 * (n - 1)
    judge = expect_cost if is_more else expect
    judge(f"{here}: the ranks that rank 0 receives from, once each,", up, [*range(1, n)])
    judge(
        f"{here}: the ranks that receive one message, the sum,",
        sorted(dst for _, dst in down),
        [*range(1, n)],
    )
    if is_more:
        return
    most, rounds = ceil(log2(n)), rounds_of_tree(down, 0)
    check_cost(
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

# Task 1.7: all_reduce_recursive_doubling


def _check_partners(call: Call) -> None:
    n, core, edges = call.n, _core(call.n), edges_of(call.run)
    handed = f" Each rank r ≥ {core} hands x over to rank r - {core}, and gets the sum back."
    for rank in range(n):
        wanted, got = (
            [dst for src, dst in each if src == rank] for each in (_edges_of_doubling(n), edges)
        )
        judge = expect_cost if len(got) > len(wanted) else expect
        judge(
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
