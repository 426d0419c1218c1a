"""Judges tasks 3.1 to 3.3: chunks, sums, who sends what to whom, rounds and memory."""

from functools import partial
from typing import Any

from distlab.grade import check
from distlab.util.text import counted
from judging.collective import AllGather, AllReduce, Call, Contract, ReduceScatter
from judging.tensors import uneven_size
from phase3.ring_checks import (
    CHUNKS_ARE_VIEWS,
    NOT_IN_A_BATCH,
    OF_MESSAGES,
    STUCK,
    TOGETHER,
    check_bytes_of_all_reduce,
    check_neighbours,
    check_sent,
    chunk_bytes,
    messages_around,
    sent_by,
    text_of,
    why_not_sent,
)

ONE_CHUNK = (
    "A rank needs x and one chunk to receive into, which it can use again in every step. Send the "
    "chunks of x themselves, and add in place: x.clone() and a + b make tensors."
)
RING: dict[str, Any] = {
    "worlds": (2, 3, 4, 5, 8, 1),
    "length": uneven_size,
    "made_of": OF_MESSAGES,
    "late": TOGETHER,
    "stuck": STUCK,
}


def _check_scatter(call: Call) -> None:
    check_neighbours(call.run)
    chunks = chunk_bytes(call)
    for rank in range(call.n):
        wanted = chunks[:rank] + chunks[rank + 1 :]
        check_sent(call, rank, wanted, f"every chunk but chunk {rank}, once")


SCATTER = Contract(
    task="3.1",
    name="reduce_scatter",
    collective=ReduceScatter("ring_reduce_scatter", advice=CHUNKS_ARE_VIEWS),
    traffic=_check_scatter,
    messages=messages_around,
    rounds=lambda n: n - 1,
    inboxes=lambda _rank: 1,
    memory=ONE_CHUNK,
    if_batched=NOT_IN_A_BATCH,
    **RING,
)
globals().update(SCATTER.tests())


def _check_gather(call: Call) -> None:
    check_neighbours(call.run)
    chunks = chunk_bytes(call)
    for rank in range(call.n):
        right = (rank + 1) % call.n
        wanted = chunks[:right] + chunks[right + 1 :]
        which = f"every chunk but chunk {right}, which rank {right} brings itself, once"
        check_sent(call, rank, wanted, which)


GATHER = Contract(
    task="3.2",
    name="all_gather",
    collective=AllGather(
        "ring_all_gather",
        advice="In each step, pass on the chunk that arrived last, and receive the one before it, "
        f"into its place in x. {CHUNKS_ARE_VIEWS}",
    ),
    traffic=_check_gather,
    messages=messages_around,
    rounds=lambda n: n - 1,
    inboxes=lambda _rank: 0,
    memory="A rank needs x alone: a chunk can be received into its place in x.",
    if_batched=NOT_IN_A_BATCH,
    **RING,
)
globals().update(GATHER.tests())


def _check_all_reduce(call: Call) -> None:
    """Check that every rank sends 2(N-1) messages of a chunk, whichever chunks these are."""
    check_neighbours(call.run)
    chunks, most = chunk_bytes(call), 2 * (call.n - 1)
    fewest = 2 * (sum(map(bool, chunks)) - 1)  # empty chunks need not be sent
    for rank, count in enumerate(call.run.messages):
        sent = sent_by(call.run, rank)
        check(
            {*sent} <= {*chunks} and fewest <= len(sent) <= count <= most,
            f"rank {rank} of {call.n} should send {counted(most, 'message')}, each of a chunk, "
            f"{min(chunks):,} or {max(chunks):,} bytes; it sends {text_of(sent, count)}. "
            f"{why_not_sent(sent, most, chunks)}",
        )
    check_bytes_of_all_reduce(call)


REDUCE = Contract(
    task="3.3",
    name="all_reduce",
    collective=AllReduce("ring_all_reduce", advice=CHUNKS_ARE_VIEWS),
    traffic=_check_all_reduce,
    messages=partial(messages_around, times=2),
    rounds=lambda n: 2 * (n - 1),
    inboxes=lambda _rank: 1,
    memory=ONE_CHUNK,
    **RING,
)
globals().update(REDUCE.tests())
