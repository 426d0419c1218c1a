"""Judges task 3.4: a ring in segments, which adds one while the next is on its way."""

from collections.abc import Sequence
from math import ceil

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.sim import GPU, Cluster
from distlab.sim.engine.trace import Event
from distlab.util.text import counted
from judging.checks import (
    MEASURED,
    check_no_collective,
    check_peak,
    check_waited,
    of_members,
    sizes_of,
    uneven,
)
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase3 import ring as b
from phase3.ring_checks import (
    IN_GROUP,
    ITEM_BYTES,
    OF_MESSAGES,
    SLACK_BYTES,
    STUCK,
    check_bytes_of_all_reduce,
    check_neighbours,
    check_same_bits,
    check_sums,
    check_sums_of_powers,
    chunk_bytes,
    sent_by,
)

FEW_BYTES = 20  # a segment of 2 numbers of float64, 5 of float32 or 20 of uint8
SEGMENT = 4096  # elements
SEGMENTS, FEW_SEGMENTS = 16, 4  # of a chunk, for its time and its memory
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
ORDER = "Is a segment added before it is sent on, also where a chunk has no other? "
TOLERANCE = 0.1  # for the first and the last segment, of 16, of each step


@task("3.4")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_segments_travel_round_the_ring(grade: Grade, n: int) -> None:
    _check_ring(grade, n, grade.random.randrange(6000, 12_000))  # also such as 4 does not divide


@task("3.4")
def test_a_chunk_that_is_short_enough_is_one_segment(grade: Grade) -> None:
    _check_ring(grade, 3, 2**20)


def _check_ring(grade: Grade, n: int, segment_bytes: int) -> None:
    num_elements = b.uneven_size(grade.random)
    run = grade.run(
        *(b.reduce_my_rank, n, b.SEGMENTED, num_elements, segment_bytes), if_stuck=STUCK
    )
    check_sums_of_powers(run)
    check_no_collective(run, OF_MESSAGES)
    check_neighbours(run)
    check_waited(run)
    _check_segments(run, num_elements, segment_bytes)
    check_bytes_of_all_reduce(run, num_elements)


def _check_segments(run: Run, num_elements: int, segment_bytes: int) -> None:
    n, chunk = len(run.results), max(chunk_bytes(num_elements, len(run.results)))
    segments = ceil(chunk / (segment_bytes // ITEM_BYTES * ITEM_BYTES))
    most = 2 * (n - 1) * segments
    for rank, sent in enumerate(run.messages):
        longest = max(sent_by(run, rank), default=0)
        here = f"rank {rank} of {n}, with segment_bytes={segment_bytes:,}"
        check(
            longest <= segment_bytes,
            f"{here}: it sends a message of {longest:,} bytes; a message should hold at most "
            f"segment_bytes. A chunk has {chunk:,} bytes: cut it into "
            f"{counted(segments, 'segment')}.",
        )
        check(
            sent <= most,
            f"{here}: it sends {counted(sent, 'message')}; {counted(most, 'message')} are enough, "
            f"{segments} for a chunk of {chunk:,} bytes in each of {2 * (n - 1)} steps. Every "
            "message costs a latency: make segments as long as they may be.",
        )


@task("3.4", real=True)
@pytest.mark.parametrize("n", [2, 3])
def test_segments_sum_every_kind(grade: Grade, n: int) -> None:
    _check_every_kind(grade, n, FEW_BYTES)


@task("3.4")
@pytest.mark.parametrize(("n", "segment_bytes"), [(1, 0), (3, 0), (4, 8), (8, 2 * FEW_BYTES)])
def test_segments_of_any_size(grade: Grade, n: int, segment_bytes: int) -> None:
    _check_every_kind(grade, n, segment_bytes)


def _check_every_kind(grade: Grade, n: int, segment_bytes: int) -> None:
    options = uneven(grade.random, n)
    run = grade.run(
        *(b.reduce_all_kinds, n, b.SEGMENTED, segment_bytes), options=options, if_stuck=STUCK
    )
    check_sums(run.results, cause=ORDER)
    if grade.is_simulated:
        check_waited(run)
        longest = max(sizes_of(run), default=0)
        check(
            not segment_bytes or longest <= segment_bytes,
            f"with segment_bytes={segment_bytes}, a message of {longest} bytes was sent. A message "
            "should hold at most segment_bytes: an element of x has x.element_size() of them, 1 to "
            "8 here.",
        )


@task("3.4")
def test_segments_give_all_ranks_the_same_bits(grade: Grade) -> None:
    num_elements = grade.random.randrange(500, 1000)
    run = grade.run(b.reduce_fractions, 5, b.SEGMENTED, num_elements, 400, if_stuck=STUCK)
    check_same_bits(run)


@task("3.4")
def test_segments_inside_a_group(grade: Grade) -> None:
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.reduce_all_kinds, b.SEGMENTED, FEW_BYTES),
        if_stuck=STUCK_IN_GROUP,
    )
    check_sums(of_members(run), IN_GROUP, ORDER)


@task("3.4")
@pytest.mark.parametrize("n", [2, 4])
def test_two_segments_of_memory_are_enough(grade: Grade, n: int) -> None:
    num_elements, segment_bytes = n * FEW_SEGMENTS * SEGMENT, ITEM_BYTES * SEGMENT
    run = grade.run(
        *(b.use_unwritten, n, b.SEGMENTED, num_elements, segment_bytes),
        options=MEASURED,
        if_stuck=STUCK,
    )
    most = ITEM_BYTES * num_elements + 2 * segment_bytes + SLACK_BYTES
    check_peak(
        *(run, [most] * n),
        f"A rank needs x and two segments to receive into, of {segment_bytes:,} bytes each; a "
        f"chunk has {FEW_SEGMENTS} segments. Use their memory in turn, receive into x itself "
        "what is to replace a chunk, and add in place: a + b makes a tensor.",
    )


@task("3.4")
@pytest.mark.parametrize("n", [2, 4])
def test_the_next_segment_travels_while_one_is_added(grade: Grade, n: int) -> None:
    chunk_elements = SEGMENTS * SEGMENT
    run = grade.run(
        *(b.use_unwritten, n, b.SEGMENTED, n * chunk_elements, ITEM_BYTES * SEGMENT),
        cluster=SLOW_TO_ADD,
        if_stuck=STUCK,
    )
    _check_segments(run, n * chunk_elements, ITEM_BYTES * SEGMENT)
    message_s = 2 * (n - 1) * chunk_elements * ITEM_BYTES / LINK_BYTES_PER_S
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
