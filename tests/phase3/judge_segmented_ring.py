"""Judges task 3.4: a ring in segments, which adds one while the next is on its way."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from random import Random
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.sim import GPU, Cluster
from distlab.sim.engine.trace import Event
from distlab.util.text import counted
from judging.collective import AllReduce, Call, Contract, check_results, use
from judging.tensors import KINDS, LONG, Kind, exact, uneven_size, unwritten
from phase3.ring_checks import (
    CHUNKS_ARE_VIEWS,
    OF_MESSAGES,
    STUCK,
    check_bytes_of_all_reduce,
    check_neighbours,
    chunk_bytes,
    messages_around,
    sent_by,
)

FEW_BYTES = 20  # a segment of 2 numbers of float64, 5 of float32 or 20 of uint8
SEGMENT = 4096  # elements
SEGMENTS = 16  # of a chunk, where time is measured
LINK_BYTES_PER_S = 10e9
ADDING_SHARE = 0.9  # of a message's time: adding reads two numbers and writes one
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
TOLERANCE = 0.1  # for the first and the last segment, of 16, of each step


def _check_traffic(call: Call) -> None:
    check_neighbours(call.run)
    _check_segments(call)
    check_bytes_of_all_reduce(call)


def _check_segments(call: Call) -> None:
    segment_bytes, item_bytes = call.variant.keywords["segment_bytes"], call.kind.item_bytes
    chunk = max(chunk_bytes(call))
    segments = ceil(chunk / (segment_bytes // item_bytes * item_bytes))
    most = 2 * (call.n - 1) * segments
    for rank, sent in enumerate(call.run.messages):
        longest = max(sent_by(call.run, rank), default=0)
        here = f"rank {rank} of {call.n}, with segment_bytes={segment_bytes:,}"
        check(
            longest <= segment_bytes,
            f"{here}: it sends a message of {longest:,} bytes; a message should hold at most "
            f"segment_bytes. A chunk has {chunk:,} bytes: cut it into "
            f"{counted(segments, 'segment')}.",
        )
        check(
            sent <= most,
            f"{here}: it sends {counted(sent, 'message')}; {counted(most, 'message')} are enough, "
            f"{segments} for a chunk of {chunk:,} bytes in each of {2 * (call.n - 1)} steps. Every "
            "message costs a latency: make segments as long as they may be.",
        )


class _Segmented(Contract):
    def drawn(self, random: Random, n: int) -> tuple[Any, Kind]:
        # most lengths of a segment are no whole number of elements
        variant = self.collective.cut_into(random.randrange(6000, 12_000))
        return variant, Kind((self.length(random),))


SEGMENTED = _Segmented(
    task="3.4",
    name="segments",
    collective=AllReduce(
        "segmented_ring_all_reduce",
        {"segment_bytes": FEW_BYTES},
        advice="Is a segment added before it is sent on, also where a chunk has no other? "
        f"{CHUNKS_ARE_VIEWS}",
    ),
    worlds=(2, 3, 4, 5, 8, 1),
    length=uneven_size,
    made_of=OF_MESSAGES,
    traffic=_check_traffic,
    messages=partial(messages_around, times=2),
    rounds=None,
    late="",
    inboxes=lambda _rank: 2,
    memory="A rank needs x and two segments to receive into. Use their memory in turn, receive "
    "into x itself what is to replace a chunk, and add in place: a + b makes a tensor.",
    stuck=STUCK,
    kinds=tuple(kind for kind in KINDS if kind.num_elements < LONG),
)
globals().update(SEGMENTED.tests())


@task("3.4")
def test_a_chunk_that_is_short_enough_is_one_segment(grade: Grade) -> None:
    kind = Kind((uneven_size(grade.random),))
    SEGMENTED.check_call(grade, 3, SEGMENTED.collective.cut_into(2**20), kind)


@task("3.4")
@pytest.mark.parametrize(("n", "keywords"), [(3, {}), (4, {"segment_bytes": 8})], ids=["3", "4"])
def test_segments_of_any_length(grade: Grade, n: int, keywords: dict[str, int]) -> None:
    args = [replace(SEGMENTED.collective, keywords=keywords)], [*SEGMENTED.kinds], exact
    check_results(grade.run(use, n, *args, if_stuck=STUCK).results, *args)


@task("3.4")
@pytest.mark.parametrize("n", [2, 4])
def test_the_next_segment_travels_while_one_is_added(grade: Grade, n: int) -> None:
    chunk_elements = SEGMENTS * SEGMENT
    variant, kind = SEGMENTED.collective.cut_into(4 * SEGMENT), Kind((n * chunk_elements,))
    run = grade.run(*(use, n, [variant], [kind], unwritten), cluster=SLOW_TO_ADD, if_stuck=STUCK)
    _check_segments(Call(run, variant, kind))
    message_s = 2 * (n - 1) * chunk_elements * 4 / LINK_BYTES_PER_S
    check(
        run.seconds <= message_s * (1 + TOLERANCE),
        f"{n} ranks, whose devices add a segment in {ADDING_SHARE:.0%} of the time that its "
        f"message takes: the all-reduce should take {1 + TOLERANCE:.2f} times as long as its "
        f"messages at most; yours takes {run.seconds / message_s:.2f} times as long. "
        f"{_why_slow(run, ADDING_SHARE * message_s / 2)}",
    )


def _why_slow(run: Run, adding_s: float) -> str:
    """Say what rank 0 computes beside adding each segment once, or how long it waits meanwhile."""
    events = [event for event in (run.trace.events if run.trace else []) if event.rank == 0]
    computed = [event for event in events if event.kind == "compute"]
    total_s = sum(event.end_s - event.start_s for event in computed)
    if total_s > 1.01 * adding_s:
        return (
            f"Rank 0 computes for {total_s / adding_s:.2f} times as long as adding every segment "
            "once takes: does it copy, clear or add more than it has to?"
        )
    arriving = [event for event in events if event.kind == "recv"]
    idle_s = sum(_uncovered_s(event, arriving) for event in computed)
    idle = f"For {idle_s / total_s:.0%} of the time in which rank 0 adds" if total_s else "At times"
    return (
        f"{idle}, no segment is on its way to it. Start the next exchange before you add what has "
        "arrived."
    )


def _uncovered_s(event: Event, others: Sequence[Event]) -> float:
    """The seconds of an event in which none of the others, ordered by their ends, goes on."""
    uncovered_s, since_s = 0.0, event.start_s
    for other in sorted(others, key=lambda other: other.start_s):
        if other.end_s > since_s and other.start_s < event.end_s:
            uncovered_s += max(other.start_s - since_s, 0.0)
            since_s = min(max(since_s, other.end_s), event.end_s)
    return uncovered_s + event.end_s - since_s
