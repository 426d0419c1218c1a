"""Judges task 1.5: what arrives, along which tree, at what cost."""

from math import ceil, log2
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted
from judging import tensors as t
from judging.checks import (
    MEASURED,
    UNIFORM,
    check_no_collective,
    check_peak,
    check_sizes,
    check_waited,
    edges_of,
    of_members,
    rounds_of,
    rounds_of_tree,
    short,
    uneven,
)
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase1 import collectives as c


@task("1.5")
@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7, 8, 16])
def test_broadcast_takes_logarithmically_many_rounds(grade: Grade, n: int) -> None:
    # So few bytes that several sends started at once take as long as one.
    src, num_elements = grade.random.randrange(n), grade.random.randrange(1, 30)
    run = grade.run(c.broadcast_from, n, src, num_elements, cluster=UNIFORM)
    _check_holds_src(run, src)
    check_no_collective(run, "broadcast should be made of send and recv")
    _check_tree(run, src)
    _check_rounds(run, src, rounds_of(run, 4 * num_elements))
    check_waited(run)


def _check_holds_src(run: Run, src: int) -> None:
    n = len(run.results)
    for rank, got in enumerate(run.results):
        check(
            got == float(src),
            f"rank {rank} of {n} should hold {src}.0, the value on src = {src}; it holds {got}. "
            "Number the ranks by their distance from src, wrapping around.",
        )


def _check_tree(run: Run, src: int) -> None:
    n, edges = len(run.results), edges_of(run)
    check(
        len(edges) == n - 1,
        f"a broadcast on {counted(n, 'rank')} needs {counted(n - 1, 'message')}, one for each rank "
        f"that lacks the data; messages sent per rank, with src = {src}: {run.messages}.",
    )
    _check_rounds(run, src, rounds_of_tree(edges, src))


def _check_rounds(run: Run, src: int, rounds: float) -> None:
    n = len(run.results)
    most = ceil(log2(n))
    check(
        max(run.messages) <= most and rounds <= most + 0.01,
        f"a broadcast on {counted(n, 'rank')} needs {counted(most, 'round')}, in which no rank "
        f"sends more than {counted(most, 'message')}; with src = {src}, yours takes {rounds:g}. "
        f"Messages sent per rank: {run.messages}. Every rank that has the data passes it on, and "
        "sends first to the rank that must pass it on to the most others.",
    )


@task("1.5")
def test_broadcast_needs_no_memory(grade: Grade) -> None:
    num_elements = t.even_size(grade.random, *t.LARGE)
    run = grade.run(c.broadcast_from, 5, 1, num_elements, options=MEASURED)
    check_no_collective(run, "broadcast should be made of send and recv")
    _check_tree(run, 1)
    check_peak(
        *(run, [4 * num_elements + 256] * 5),
        "Send and receive x itself: no copy or second tensor is needed.",
    )


@task("1.5", real=True)
def test_broadcast_from_every_rank_of_every_kind(grade: Grade) -> None:
    for n in (3, 4):
        run = grade.run(c.broadcast_all_kinds, n, options=uneven(grade.random, n))
        _check_broadcast(run.results)
        if grade.is_simulated:
            check_no_collective(run, "broadcast should be made of send and recv")
            sizes = t.sizes_of_kinds()
            check_sizes(run, {size: count * n * (n - 1) for size, count in sizes.items()})
            check_waited(run)


def _check_broadcast(by_rank: list[Any]) -> None:
    n = len(by_rank)
    for src in range(n):
        expected = t.plain(t.tensors_of(src))
        for rank in range(n):
            for kind, wanted, got in zip(t.KINDS, expected, by_rank[rank][src], strict=True):
                check(
                    got == wanted,
                    f"rank {rank} of {n}, src {src}, {kind[1]} of shape {kind[0]}: x should be "
                    f"{short(wanted)}, but is {short(got)}. Write into x itself, and send it in "
                    "its own dtype: a cast loses digits.",
                )


@task("1.5")
def test_two_broadcasts_do_not_mix(grade: Grade) -> None:
    for srcs in ([0, 3], [0, 5]):
        for rank, got in enumerate(grade.run(c.broadcast_twice, 8, 2, srcs).results):
            expected = [float(srcs[0]), 10.0 + srcs[1]]
            check(
                got == expected,
                f"rank {rank} of 8 should get {expected} from two broadcasts, one after the other, "
                f"from ranks {srcs[0]} and {srcs[1]}, even if rank 2 is late; it got {got}. Name "
                "the rank that you receive from: without group_src=, recv accepts any message, "
                "even one from the next broadcast.",
            )


@task("1.5")
def test_broadcast_inside_a_group(grade: Grade) -> None:
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, c.broadcast_all_kinds), if_stuck=STUCK_IN_GROUP
    )
    _check_broadcast(of_members(run))
