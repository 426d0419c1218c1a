"""Judges task 3.9: how often the ring crosses each level of the tree, and how fast it is."""

from itertools import product
from random import Random
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.sim import Cluster
from distlab.util.text import counted
from judging.checks import check_silent, short
from phase3 import orders as b

LEVELS = ("host", "leaf switch", "pod")
SHAPES: list[list[Any]] = [  # ranks of each host; hosts of each leaf; leaves of each pod; and so on
    [1],
    [2],
    [1, 1],
    [3],
    [2, 3],
    [1, 1, 1, 1, 1],
    [2, 2, 2, 2],
    [4, 1, 3],
    [[2, 2], [2, 2]],
    [[3, 1], [2], [2, 2, 1]],
    [[[2, 2], [2, 2]], [[2, 2], [3, 2]]],
    [[8, 8], [8, 8], [8, 8], [8, 8]],
    [2, 3, 3],
]
NUM_DRAWN = 20  # trees of other sizes
Place = tuple[int, ...]  # of a rank: which pod, which leaf in it, which host in that, …


def _places(shape: list[Any], above: Place = ()) -> list[Place]:
    """Where each rank is."""
    places = []
    for number, part in enumerate(shape):
        here = (*above, number)
        places += [here] * part if isinstance(part, int) else _places(part, here)
    return places


def _drawn(random: Random, depth: int) -> list[Any]:
    """Draw a tree of so many levels, with one to three parts or ranks in each part."""
    number = random.randint(1, 3)
    return [_drawn(random, depth - 1) if depth > 1 else random.randint(1, 4) for _ in range(number)]


def _measured(places: list[Place], random: Random, noise: float) -> b.Matrix:
    """Seconds of a message between any two ranks: three times as long per level, with noise."""
    depth, fastest_s = len(places[0]), 10 ** random.uniform(-6, -3)
    return [
        [
            fastest_s * 3 ** (depth - _common(one, other)) * random.uniform(1 - noise, 1 + noise)
            if i != j
            else random.choice((0.0, fastest_s, 1.0))
            for j, other in enumerate(places)
        ]
        for i, one in enumerate(places)
    ]


def _common(one: Place, other: Place) -> int:
    """How many levels two ranks share, from the top."""
    return next((k for k, (a, b) in enumerate(zip(one, other)) if a != b), len(one))  # noqa: B905


@task("3.9")
def test_each_part_of_the_tree_is_entered_once(grade: Grade) -> None:
    cases = []
    drawn = [_drawn(grade.random, grade.random.randint(1, 3)) for _ in range(NUM_DRAWN)]
    for shape, noise in product([*SHAPES, *drawn], (0.2, 0.0)):  # without noise, times are equal
        places = _places(shape)
        grade.random.shuffle(places)
        cases.append((places, _measured(places, grade.random, noise)))
    run = grade.run(b.order_all, 2, [matrix for _, matrix in cases])
    check_silent(run, "ring_order")
    for rank, found in enumerate(run.results):
        for (places, _), (order, is_kept) in zip(cases, found, strict=True):
            where = f"rank {rank} of 2, {_told(places)}"
            _check_permutation(where, order, len(places))
            check(is_kept, f"{where}: seconds should only be read; ring_order has changed it.")
            for level in range(len(places[0])):
                _check_crossings(where, order, places, level)


def _told(places: list[Place]) -> str:
    names = ["/".join(str(part) for part in place) for place in places]
    levels = "/".join(reversed(LEVELS[: len(places[0])]))
    return f"{counted(len(places), 'rank')}, {levels} of each {short(names)}"


def _check_permutation(where: str, order: list[int], n: int) -> None:
    check(
        sorted(order) == list(range(n)) and order[0] == 0,
        f"{where}: the order should hold each of the ranks 0 to {n - 1} once, and begin with rank "
        f"0; it is {short(order)}. The ring closes by itself: rank 0 does not come again. "
        "At equal times, too, only ranks that are not yet in the order may be chosen.",
    )


def _check_crossings(where: str, order: list[int], places: list[Place], level: int) -> None:
    parts = [places[rank][: level + 1] for rank in order]
    crossed = sum(one != other for one, other in zip(parts, [*parts[1:], parts[0]], strict=True))
    num_parts = len(set(parts))
    fewest = num_parts if num_parts > 1 else 0
    name = LEVELS[len(places[0]) - level - 1]
    names = f"{name}es" if name.endswith("ch") else f"{name}s"
    check(
        crossed == fewest,
        f"{where}: the ring {short(order)} crosses between {names} {crossed} times; "
        f"with {num_parts} of them, {fewest} will do. It should enter each {name} once, go through "
        "all ranks there, and leave it once. Where the nearest is, ask the rank that was added "
        "last: what is equally far from rank 0 may be in different places.",
    )


@task("3.9")
@pytest.mark.parametrize("numbering", ["block", "cyclic"])
def test_a_ring_in_that_order_is_as_fast_as_any(grade: Grade, numbering: str) -> None:
    cluster = Cluster(
        4,
        2,
        topology="fat-tree",
        nodes_per_leaf=2,
        oversubscription=8,
        numbering=numbering,
        latency_s=1e-6,
        net_latency_s=2e-6,
    )
    num_bytes = 2 * 10**6
    seconds = [
        [_message_s(cluster, i, j, num_bytes) * grade.random.uniform(0.95, 1.05) for j in range(8)]
        for i in range(8)
    ]
    run = grade.run(b.reduce_in_order, 8, seconds, num_bytes // 4, cluster=cluster)
    order = run.results[0][0]
    _check_permutation("8 ranks of a fat tree", order, 8)
    best = sorted(range(8), key=cluster.place_of)
    taken_s = max(taken_s for _, taken_s in run.results)
    best_s = max(grade.run(b.seconds_around, 8, best, num_bytes // 4, cluster=cluster).results)
    check(
        taken_s <= 1.01 * best_s,
        f"8 ranks, 2 on each of 4 hosts, 2 hosts below each leaf switch: a ring all-reduce of 2 MB "
        f"in your order {order} takes {1e6 * taken_s:.0f} µs; in the order {best} it takes "
        f"{1e6 * best_s:.0f} µs. Where several neighbours cross at once, they share slow links.",
    )


def _message_s(cluster: Cluster, src: int, dst: int, num_bytes: int) -> float:
    route = cluster.route(src, dst)
    slowest = min((cluster.links[link].bytes_per_s for link in route.links), default=1e30)
    return route.latency_s + num_bytes / slowest
