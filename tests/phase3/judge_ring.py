"""Judges tasks 3.1 to 3.3: chunks, sums, senders and receivers, rounds and memory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from random import Random
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, check_cost, task
from distlab.sim import GPU, Cluster
from distlab.util.text import counted
from judging.checks import edges_of
from judging.collective import (
    AllGather,
    AllReduce,
    Call,
    Contract,
    ReduceScatter,
    check_results,
    use,
)
from judging.tensors import (
    KINDS,
    LONG,
    Kind,
    chunk_lengths,
    exact,
    uneven_size,
    unwritten,
)

CHUNKS_ARE_VIEWS = (
    "Are the chunks views of x, as x.view(-1).tensor_split cuts them, of which some are empty if "
    "there are fewer elements than ranks? Is every part added before it is sent on, or overwritten "
    "by what arrives next? Add and send in the dtype of x: a cast loses digits."
)
ONE_CHUNK = (
    "A rank needs x and one chunk to receive into, which it can use again in every step. Send the "
    "chunks of x themselves, and add in place: x.clone() and a + b make tensors."
)
NOT_IN_A_BATCH = (
    "On NCCL, messages between the same two ranks wait for each other, unless they start in one "
    "batch_isend_irecv, as in exchange (given): isend beside irecv is no batch. Of 2 ranks, each "
    "is the right and the left neighbour of the other."
)
RING: dict[str, Any] = {
    "worlds": (2, 3, 4, 5, 8, 1),
    "length": uneven_size,
    "made_of": "a ring should be made of messages between neighbours (exchange, isend, irecv)",
    "stuck": "In each step, every rank should start its send and its receive together, as exchange "
    "does: where all ranks first wait for their sends, or all for what they receive, none gets on.",
}
TOGETHER = (
    "Start the send and the receive of a step together (exchange): a rank that waits until its own "
    "chunk has been received, and only then receives, holds up its left neighbour."
)


# Traffic of a ring


def _messages_around(num_elements: int, n: int, times: int = 1) -> Counter[int]:
    """Return the lengths of all messages if every chunk goes round the ring ``times`` times."""
    lengths: Counter[int] = Counter()
    for length in chunk_lengths(num_elements, n):
        lengths[length] += times * (n - 1)
    return lengths


def _check_neighbours(run: Run) -> None:
    """Check that every rank sends only to its right neighbour."""
    n, edges = len(run.results), edges_of(run)
    is_left = n > 2 and all(dst == (src - 1) % n for src, dst in edges)
    cause = " These are left neighbours: your chunks travel the other way." if is_left else ""
    for rank in range(n):
        right = (rank + 1) % n
        to = sorted({dst for src, dst in edges if src == rank})
        check(
            {*to} <= {right},
            f"rank {rank} of {n} sends to ranks {to}; round the ring, every rank should send to "
            f"its right neighbour alone, here rank {right}.{cause}",
        )


def _chunk_bytes(call: Call) -> list[int]:
    lengths = chunk_lengths(call.kind.num_elements, call.n)
    return [length * call.kind.item_bytes for length in lengths]


def _sent_by(run: Run, rank: int) -> list[int]:
    """Return the sorted sizes in bytes of the nonempty messages that a rank sends."""
    pairs = run.trace.pairs() if run.trace else []
    return sorted(send.num_bytes for send, _ in pairs if send.rank == rank and send.num_bytes)


def _check_chunks(call: Call, offset: int, which: str) -> None:
    """Check that each rank r sends its neighbour all chunks but chunk r + offset, in any order."""
    _check_neighbours(call.run)
    chunks = _chunk_bytes(call)
    for rank, count in enumerate(call.run.messages):
        left_out = (rank + offset) % call.n
        wanted = chunks[:left_out] + chunks[left_out + 1 :]
        sent = _sent_by(call.run, rank)
        is_more = count > len(wanted) or sum(sent) > sum(wanted)
        judge = check_cost if is_more else check
        judge(
            sent == sorted(size for size in wanted if size) and count <= len(wanted),
            f"rank {rank} of {call.n} should send {which.format(left_out)}, once: {_text(wanted)}. "
            f"It sends {_text(sent, count)}. {_why_not_sent(sent, len(wanted), chunks)}",
        )


def _text(sizes: Sequence[int], count: int | None = None) -> str:
    """Describe messages in words: their number, their bytes in all, and the bytes of the longest.

    If ``count`` is None, there are as many messages as ``sizes``.
    """
    count = len(sizes) if count is None else count
    longest = f", at most {max(sizes):,} in a message" if sizes else ""
    return f"{counted(count, 'message')}, {sum(sizes):,} bytes in all{longest}"


def _why_not_sent(sent: Sequence[int], num_messages: int, chunks: Sequence[int]) -> str:
    """Return the likely reason why a rank sends the wrong bytes."""
    if {*sent} == {max(chunks)} and min(chunks) < max(chunks):
        return (
            "All messages are as long as the longest chunk: this is padding. Send every chunk as "
            "long as tensor_split cuts it."
        )
    if max(sent, default=0) == sum(chunks):
        return "A message holds the whole tensor: send one chunk in each step."
    if max(sent, default=0) > max(chunks):
        return (
            "A message is longer than the longest chunk: are the chunks those of tensor_split, and "
            "do they travel in the dtype of x?"
        )
    if len(sent) == num_messages:
        return (
            "Does each chunk travel as tensor_split cuts it, and is it the right one that this "
            "rank never sends?"
        )
    return "One chunk leaves in each step, as it is: not in parts, and none twice."


# Task 3.1: ring_reduce_scatter


SCATTER = Contract(
    task="3.1",
    name="reduce_scatter",
    collective=ReduceScatter("ring_reduce_scatter", advice=CHUNKS_ARE_VIEWS),
    traffic=lambda call: _check_chunks(call, 0, "every chunk but chunk {}"),
    messages=_messages_around,
    rounds=lambda n: n - 1,
    late=TOGETHER,
    inboxes=lambda _rank: 1,
    memory=ONE_CHUNK,
    if_batched=NOT_IN_A_BATCH,
    **RING,
)
globals().update(SCATTER.tests())


# Task 3.2: ring_all_gather


GATHER = Contract(
    task="3.2",
    name="all_gather",
    collective=AllGather(
        "ring_all_gather",
        advice="In each step, pass on the chunk that arrived last, and receive the one before it, "
        f"into its place in x. {CHUNKS_ARE_VIEWS}",
    ),
    traffic=lambda call: _check_chunks(
        call, 1, "every chunk but chunk {0}, which rank {0} brings itself"
    ),
    messages=_messages_around,
    rounds=lambda n: n - 1,
    late=TOGETHER,
    inboxes=lambda _rank: 0,
    memory="A rank needs x alone: a chunk can be received into its place in x.",
    if_batched=NOT_IN_A_BATCH,
    **RING,
)
globals().update(GATHER.tests())


# Task 3.2: ring_all_reduce


def _check_all_reduce(call: Call) -> None:
    """Check that every rank sends 2(N-1) messages of one chunk each, no matter which chunks."""
    _check_neighbours(call.run)
    chunks, most = _chunk_bytes(call), 2 * (call.n - 1)
    fewest = 2 * (sum(map(bool, chunks)) - 1)  # empty chunks need not be sent
    for rank, count in enumerate(call.run.messages):
        sent = _sent_by(call.run, rank)
        is_more = count > most or max(sent, default=0) > max(chunks)
        judge = check_cost if is_more else check
        judge(
            {*sent} <= {*chunks} and fewest <= len(sent) <= count <= most,
            f"rank {rank} of {call.n} should send {counted(most, 'message')}, each of a chunk, "
            f"{min(chunks):,} or {max(chunks):,} bytes; it sends {_text(sent, count)}. "
            f"{_why_not_sent(sent, most, chunks)}",
        )
    _check_bytes_of_all_reduce(call)


def _check_bytes_of_all_reduce(call: Call) -> None:
    """Check that every rank sends the bytes of all chunks but one, twice."""
    chunks, whole = _chunk_bytes(call), call.kind.num_bytes
    least, most = 2 * (whole - max(chunks)), 2 * (whole - min(chunks))
    for rank, sent in enumerate(call.run.bytes_sent):
        judge = check_cost if sent > most else check
        judge(
            least <= sent <= most,
            f"rank {rank} of {call.n} should send {least:,} to {most:,} bytes, 2(N-1)/N of the "
            f"{whole:,} of x; it sends {sent:,.0f}. Every rank sends all chunks but one until the "
            "sums are whole, and all but one again.",
        )


REDUCE = Contract(
    task="3.2",
    name="all_reduce",
    collective=AllReduce("ring_all_reduce", advice=CHUNKS_ARE_VIEWS),
    traffic=_check_all_reduce,
    messages=partial(_messages_around, times=2),
    rounds=lambda n: 2 * (n - 1),
    late=TOGETHER,
    inboxes=lambda _rank: 1,
    memory=ONE_CHUNK,
    **RING,
)
globals().update(REDUCE.tests())


# Task 3.3: segmented_ring_all_reduce

FEW_BYTES = 20  # a segment of 2 float64, 5 float32 or 20 uint8 numbers
SEGMENT = 4096  # elements
SEGMENTS = 16  # segments per chunk in timing tests
LINK_BYTES_PER_S = 10e9
ADDING_SHARE = 0.9  # adding takes this fraction of a message's time: two reads and one write
SLOW_GPU = GPU(
    "slow at adding",
    1e15,
    3 * LINK_BYTES_PER_S / ADDING_SHARE,
    {"float32": 1e30},
    {"float32": 1e30},
)
SLOW_TO_ADD = Cluster(
    1, 4, latency_s=0.0, nvlink_bytes_per_s=LINK_BYTES_PER_S, gpu=SLOW_GPU, name="slow to add"
)
TOLERANCE = 0.1  # covers the first and the last of 16 segments in each step


def _check_segments(call: Call) -> None:
    segment_bytes, item_bytes = call.variant.keywords["segment_bytes"], call.kind.item_bytes
    chunk = max(_chunk_bytes(call))
    segments = ceil(chunk / (segment_bytes // item_bytes * item_bytes))
    most = 2 * (call.n - 1) * segments
    for rank, sent in enumerate(call.run.messages):
        longest = max(_sent_by(call.run, rank), default=0)
        here = f"rank {rank} of {call.n}, with segment_bytes={segment_bytes:,}"
        check_cost(
            longest <= segment_bytes,
            f"{here}: it sends a message of {longest:,} bytes; a message should hold at most "
            f"segment_bytes. A chunk has {chunk:,} bytes: cut it into "
            f"{counted(segments, 'segment')}.",
        )
        check_cost(
            sent <= most,
            f"{here}: it sends {counted(sent, 'message')}; {counted(most, 'message')} are enough, "
            f"{segments} for a chunk of {chunk:,} bytes in each of {2 * (call.n - 1)} steps. Every "
            "message costs a latency: make segments as long as they may be.",
        )


def _check_segmented(call: Call) -> None:
    _check_neighbours(call.run)
    _check_segments(call)
    _check_bytes_of_all_reduce(call)


class _Segmented(Contract):
    def drawn(self, random: Random, n: int) -> tuple[Any, Kind]:
        # Most segment lengths are not a whole number of elements.
        variant = self.collective.cut_into(random.randrange(6000, 12_000))
        return variant, Kind((self.length(random),))


SEGMENTED = _Segmented(
    task="3.3",
    name="segments",
    collective=AllReduce(
        "segmented_ring_all_reduce",
        {"segment_bytes": FEW_BYTES},
        advice="Two exchanges at a time need two segments to receive into: is a segment added "
        "before it is sent on, even the only one of its chunk, or overwritten by what arrives "
        "next? Add and send in the dtype of x: a cast loses digits.",
    ),
    traffic=_check_segmented,
    messages=partial(_messages_around, times=2),
    rounds=None,
    late="",
    inboxes=lambda _rank: 2,
    memory="A rank needs x and two segments to receive into. Use their memory in turn, receive "
    "into x itself what is to replace a chunk, and add in place: a + b makes a tensor.",
    kinds=tuple(kind for kind in KINDS if kind.num_elements < LONG),
    **RING,
)
globals().update(SEGMENTED.tests())


@task("3.3")
def test_a_chunk_that_is_short_enough_is_one_segment(grade: Grade) -> None:
    kind = Kind((uneven_size(grade.random),))
    SEGMENTED.check_call(grade, 3, SEGMENTED.collective.cut_into(2**20), kind)


@task("3.3")
@pytest.mark.parametrize(("n", "keywords"), [(3, {}), (4, {"segment_bytes": 8})], ids=["3", "4"])
def test_segments_of_any_length(grade: Grade, n: int, keywords: dict[str, int]) -> None:
    args = [replace(SEGMENTED.collective, keywords=keywords)], [*SEGMENTED.kinds], exact
    check_results(grade.run(use, n, *args, if_stuck=RING["stuck"]).results, *args)


@task("3.3")
@pytest.mark.parametrize("n", [2, 4])
def test_the_next_segment_travels_while_one_is_added(grade: Grade, n: int) -> None:
    chunk_elements = SEGMENTS * SEGMENT
    variant, kind = SEGMENTED.collective.cut_into(4 * SEGMENT), Kind((n * chunk_elements,))
    args = [variant], [kind], unwritten
    run = grade.run(use, n, *args, cluster=SLOW_TO_ADD, if_stuck=RING["stuck"])
    _check_segments(Call(run, variant, kind))
    message_s = 2 * (n - 1) * chunk_elements * 4 / LINK_BYTES_PER_S
    check_cost(
        run.seconds <= message_s * (1 + TOLERANCE),
        f"{n} ranks, whose devices add a segment in {ADDING_SHARE:.0%} of the time that its "
        f"message takes: the all-reduce should take {1 + TOLERANCE:.2f} times as long as its "
        f"messages at most; yours takes {run.seconds / message_s:.2f} times as long. At times, "
        "no segment is on its way to a rank that adds: start the next exchange before you add what "
        "has arrived, and do not copy, clear or add more than you have to.",
    )
