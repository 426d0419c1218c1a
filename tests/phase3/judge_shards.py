"""Judges task 3.15: balance, moves when servers join or leave, and agreement between ranks."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import torch.distributed as dist

from distlab.grade import Grade, check, task
from judging.calls import case_told, typed
from judging.checks import check_silent, short

Assigned = Mapping[str, int]


class Case(NamedTuple):
    """Arguments of ``assign_shards``."""

    sizes: Mapping[str, int]
    servers: tuple[int, ...]
    previous: Assigned | None = None

    def __str__(self) -> str:
        """Return the arguments as the end of a sentence."""
        before = "" if self.previous is None else f", previous={dict(self.previous)!r:.300}"
        return f"for sizes={dict(self.sizes)!r:.300}, servers={[*self.servers]}{before}"


def assign_all(lesson: Any, cases: Sequence[Case], seed: int) -> list[dict[str, Any]]:
    """Assign the tensors of every case, with arguments in a different order on each rank.

    Returns:
        For each case, the assignment, and whether the arguments are unchanged.
    """
    random, results = Random(seed + dist.get_rank()), []
    for case in cases:
        sizes = _shuffled(case.sizes, random)
        servers = random.sample(case.servers, len(case.servers))
        previous = None if case.previous is None else _shuffled(case.previous, random)
        given = Case(dict(sizes), tuple(servers), previous and dict(previous))
        with case_told(f"{case}"):
            assigned = lesson.assign_shards(sizes, servers, previous)
        after = Case(sizes, tuple(servers), previous)
        named = dict(typed("assign_shards", assigned, dict))
        results.append({"assigned": named, "is_unchanged": after == given})
    return results


def _shuffled(table: Mapping[str, int], random: Random) -> dict[str, int]:
    return {name: table[name] for name in random.sample(sorted(table), len(table))}


def _named(random: Random, sizes: Sequence[int]) -> dict[str, int]:
    """Return the sizes under random names."""
    names = random.sample(range(100), len(sizes))
    return {f"layers.{name}": size for name, size in zip(names, sizes, strict=True)}


def _drawn_sizes(random: Random, num_tensors: int) -> list[int]:
    """Draw sizes that are arbitrary, similar, powers of two, or a few large and many small ones."""
    num_large = random.randint(1, 4)
    kinds = (
        [random.randint(0, 20) for _ in range(num_tensors)],
        [random.choice((5, 6)) for _ in range(num_tensors)],
        [2 ** random.randint(0, 5) for _ in range(num_tensors)],
        [random.randint(1, 4) if i >= num_large else 10 for i in range(num_tensors)],
    )
    return random.choice(kinds)


def _servers(random: Random, num_servers: int) -> tuple[int, ...]:
    return tuple(random.sample(range(12), num_servers))


@task("3.15")
def test_shares_are_nearly_as_small_as_they_can_be(grade: Grade) -> None:
    random = grade.random
    cases = [
        Case({"a": 1, "b": 1, "c": 2}, (0, 1)),
        Case({"a": 3, "b": 3, "c": 2, "d": 2, "e": 2}, (4, 2)),
        Case({"a": 5, "b": 5, "c": 5, "d": 5, "e": 5, "f": 5, "g": 30}, (0, 1)),
    ]
    for num_servers in (2, 3) * 30:
        sizes = _drawn_sizes(random, random.randint(1, 14))
        cases.append(Case(_named(random, sizes), _servers(random, num_servers)))
    for case, assigned in _assigned(grade, cases):
        fullest, best = max(_loads(case, assigned).values()), _least_maximum(case)
        check(
            3 * fullest <= 4 * best,
            f"{case}: the fullest server gets {fullest} bytes; the best assignment gives it "
            f"{best}, and at most 4/3 of that, {4 * best / 3:.1f}, is allowed. Yours: {assigned}. "
            "Is the largest tensor assigned first, each to the server that has the fewest bytes "
            "(not the fewest tensors) so far?",
        )


def _least_maximum(case: Case) -> int:
    """Return the bytes on the fullest server in the best assignment."""
    states = {tuple([0] * len(case.servers))}
    for size in case.sizes.values():
        states = {
            tuple(sorted((*loads[:i], loads[i] + size, *loads[i + 1 :])))
            for loads in states
            for i in range(len(loads))
        }
    return min(max(loads) for loads in states)


def _assigned(grade: Grade, cases: Sequence[Case]) -> list[tuple[Case, Assigned]]:
    """Assign all cases, the simplest first, and check the rules for all assignments."""
    cases = sorted(cases, key=lambda case: (len(case.sizes), sum(case.sizes.values())))
    run = grade.run(assign_all, 2, cases, grade.random.randrange(1000))
    check_silent(run, "assign_shards")
    first, second = run.results
    for case, result, other in zip(cases, first, second, strict=True):
        assigned = result["assigned"]
        check(
            result["is_unchanged"],
            f"{case}: assign_shards has changed its arguments, which belong to the caller. Work on "
            "a copy: dict(previous).",
        )
        _check_names(case, assigned)
        names = [name for name in sorted(assigned) if other["assigned"].get(name) != assigned[name]]
        check(
            not names,
            f"{case}: ranks 0 and 1 choose different servers for {short(names)}. They have the "
            "same arguments, in another order. Where two tensors have the same size, or two "
            "servers the same load, let the name and the rank decide: sorted(…, key=lambda name: "
            "(-sizes[name], name)).",
        )
    return [(case, result["assigned"]) for case, result in zip(cases, first, strict=True)]


def _check_names(case: Case, assigned: Assigned) -> None:
    missing, surplus = sorted({*case.sizes} - {*assigned}), sorted({*assigned} - {*case.sizes})
    check(
        not missing and not surplus,
        f"{case}: every name in sizes should get a server, and no other name. Missing: "
        f"{short(missing)}; not in sizes: {short(surplus)}. Names may come and go: previous may "
        "lack some of sizes, and have others.",
    )
    strange = {name: server for name, server in assigned.items() if server not in case.servers}
    check(
        not strange,
        f"{case}: {short(strange)} are on no server of the list. Servers are given by their ranks, "
        "which need not be 0, 1, 2, …; and one that is only in previous has left.",
    )
    mean, largest = _mean(case), max(case.sizes.values(), default=0)
    for server, load in _loads(case, assigned).items():
        check(
            load <= mean + largest,
            f"{case}: server {server} gets {load} bytes, more than the mean, {mean:.1f}, and the "
            f"largest tensor, {largest}, together. Yours: {short(assigned)}. Each tensor that has "
            "no server should go to the one with the fewest bytes; a server that has more than the "
            "mean gives away what it can.",
        )


def _mean(case: Case) -> float:
    return sum(case.sizes.values()) / len(case.servers)


def _loads(case: Case, assigned: Assigned) -> dict[int, int]:
    loads = dict.fromkeys(case.servers, 0)
    for name in case.sizes:
        loads[assigned[name]] += case.sizes[name]
    return loads


def _check_moves(case: Case, assigned: Assigned) -> None:
    mean, previous = _mean(case), case.previous or {}
    for server in case.servers:
        had = {name for name, at in previous.items() if at == server and name in case.sizes}
        before = sum(case.sizes[name] for name in had)
        left = sorted(name for name in had if assigned[name] != server)
        moved = sum(case.sizes[name] for name in left)
        check(
            moved <= max(0.0, before - mean) + 1e-6,
            f"{case}: server {server} had {before} bytes, and the mean is now {mean:.1f}; "
            f"{moved} bytes leave it ({short(left)}), and {max(0.0, before - mean):.1f} may. Let "
            "each tensor of previous stay where it is, unless the mean or more remains on its "
            "server without it.",
        )


@task("3.15")
def test_what_any_assignment_becomes(grade: Grade) -> None:
    """Any previous assignment is possible, as servers and names come and go."""
    random = grade.random
    alike = {f"{i}": 8 for i in range(9)}
    cases = [
        *(Case({}, (3, 5)), Case({"a": 4}, (3, 5, 9)), Case({"a": 0, "b": 0}, (1,))),
        *(Case(alike, (0, 1, 2), dict.fromkeys(alike, 1)), Case({"a": 9, "b": 9}, (0, 1), {})),
    ]
    for num_tensors, largest, num_servers in ((60, 1000, 7), (40, 1000, 1), (90, 3, 3)):
        sizes = _named(random, [random.randint(0, largest) for _ in range(num_tensors)])
        servers = _servers(random, num_servers)
        cases += [Case(sizes, servers), Case(sizes, servers, dict.fromkeys(sizes, servers[0]))]
    cases += [_changed(random) for _ in range(200)]
    for case, assigned in _assigned(grade, cases):
        _check_moves(case, assigned)


def _changed(random: Random) -> Case:
    """Draw a case in which some servers and tensors are new, and one of each may be gone."""
    servers = _servers(random, random.choice((1, 2, 3, 4, 5, 8)))
    sizes = _named(random, _drawn_sizes(random, random.randint(1, random.choice((12, 40)))))
    homes = [*servers[: random.randint(1, len(servers))], *random.choice(([], [20]))]
    share = random.choice((0.8, 1.0))
    previous = {name: random.choice(homes) for name in sizes if random.random() < share}
    return Case(sizes, servers, previous | random.choice(({}, {"gone": homes[0]})))
