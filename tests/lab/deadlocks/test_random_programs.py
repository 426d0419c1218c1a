"""Random programs, checked against an interpreter that knows whether and why they hang.

A program is a list of calls per rank. The interpreter below steps through it with just one counter
per rank, and the simulated cluster must come to the same verdict on every program.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from distlab.sim import Deadlock, simulate

NUM_PROGRAMS = 400
GROUPS = ((0, 1), (1, 2), (0, 2, 3), (0, 1, 2, 3))


class Call(NamedTuple):
    """A call: "send" or "recv" with a rank, or "barrier" with the index of a group."""

    name: str
    other: int


Program = list[list[Call]]  # each rank's calls


def random_program(seed: int) -> Program:
    """Draw a correct program, then move, drop or duplicate up to two of its calls."""
    rng = random.Random(seed)
    program: Program = [[] for _ in range(rng.choice((2, 3, 4)))]
    for _ in range(rng.randint(2, 6)):
        for rank, call in _matching_calls(rng, len(program)):
            program[rank].append(call)
    for _ in range(2):
        _break(rng, rng.choice([calls for calls in program if calls]))
    return program


def _matching_calls(rng: random.Random, size: int) -> Iterator[tuple[int, Call]]:
    groups = [g for g, ranks in enumerate(GROUPS) if max(ranks) < size]
    if groups and rng.random() < 0.5:
        group = rng.choice(groups)
        yield from ((rank, Call("barrier", group)) for rank in GROUPS[group])
    else:
        src, dst = rng.sample(range(size), 2)
        yield src, Call("send", dst)
        yield dst, Call("recv", src)


def _break(rng: random.Random, calls: list[Call]) -> None:
    place = rng.randrange(len(calls))
    mistake = rng.choice(("move", "drop", "double", "none"))
    if mistake == "double":
        calls.insert(place, calls[place])
    elif mistake in ("move", "drop"):
        call = calls.pop(place)
        if mistake == "move" or not calls:
            calls.insert(rng.randrange(len(calls) + 1), call)


def run_program(program: Program) -> None:
    groups = [dist.new_group(ranks) for ranks in GROUPS if max(ranks) < len(program)]
    for call in program[dist.get_rank()]:
        if call.name == "barrier":
            dist.barrier(groups[call.other])
        else:
            getattr(dist, call.name)(torch.zeros(1), call.other)


# The interpreter


def standstill(program: Program) -> dict[int, Call]:
    """Run a program until no rank can advance; return the call in which each rank is stuck."""
    done = [0] * len(program)

    def current(rank: int) -> Call | None:
        return program[rank][done[rank]] if done[rank] < len(program[rank]) else None

    def partners(rank: int) -> tuple[int, ...]:
        """Return the ranks that can advance together with ``rank``; empty if it is stuck."""
        call = current(rank)
        if call is None:
            return ()
        if call.name == "barrier":
            ranks = GROUPS[call.other]
            return ranks if all(current(member) == call for member in ranks) else ()
        answer = Call("recv" if call.name == "send" else "send", rank)
        return (rank, call.other) if current(call.other) == answer else ()

    while moving := next(filter(None, map(partners, range(len(program)))), ()):
        for rank in moving:
            done[rank] += 1
    return {rank: call for rank in range(len(program)) if (call := current(rank))}


def waits_for(rank: int, stuck: dict[int, Call]) -> set[int]:
    call = stuck[rank]
    if call.name == "barrier":
        return {member for member in GROUPS[call.other] if stuck.get(member) != call}
    return {call.other}


def reachable(rank: int, stuck: dict[int, Call]) -> set[int]:
    seen: set[int] = set()
    frontier = {rank}
    while frontier:
        frontier = set().union(*(waits_for(r, stuck) for r in frontier if r in stuck)) - seen
        seen |= frontier
    return seen


def knots(stuck: dict[int, Call]) -> list[set[int]]:
    """Return the sets of ranks that all wait for one another, ordered by lowest rank."""
    sets = [reachable(rank, stuck) for rank in sorted(stuck)]
    closed = [ranks for ranks in sets if all(reachable(r, stuck) == ranks for r in ranks)]
    return [ranks for place, ranks in enumerate(closed) if ranks not in closed[:place]]


def verdict(stuck: dict[int, Call]) -> tuple[str, set[int]] | None:
    """Return the kind of deadlock and the ranks to blame; None if all ranks have ended."""
    if not stuck:
        return None
    gone = set().union(*(waits_for(rank, stuck) for rank in stuck)) - set(stuck)
    if gone:
        return "peer ended", gone
    kinds = [
        (kind({stuck[rank].name == "barrier" for rank in knot}), knot) for knot in knots(stuck)
    ]
    first = kinds[0][0]
    return first, set().union(*(knot for name, knot in kinds if name == first))


def kind(is_barrier: set[bool]) -> str:
    """Return the kind of a deadlock whose ranks wait in messages, in collectives, or in both."""
    if len(is_barrier) == 2:
        return "missing rank"
    return "order mismatch" if is_barrier == {True} else "send/recv cycle"


def report_of(program: Program) -> Deadlock | None:
    try:
        simulate(run_program, len(program), program)
    except Deadlock as error:
        return error
    return None


@pytest.mark.parametrize("block", range(4))
def test_the_report_agrees_with_an_interpreter(block: int) -> None:
    for seed in range(block, NUM_PROGRAMS, 4):
        program = random_program(seed)
        stuck = standstill(program)
        expected, report = verdict(stuck), report_of(program)
        assert (expected is None) == (report is None), (seed, report)
        if expected and report:
            check(report, *expected)
            assert [call.rank for call in report.calls] == list(stuck), (seed, report)


def check(report: Deadlock, kind: str, ranks: set[int]) -> None:
    assert report.kind == kind, report
    if kind == "missing rank":  # the ranks that wait in the collective are not to blame
        assert set(report.ranks) < ranks, report
    else:
        assert set(report.ranks) == ranks, report
