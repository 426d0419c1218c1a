"""Judges task 3.8: crossings at each level of the tree, and the number of comparisons."""

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

from distlab.grade import Grade, check, check_cost, task
from distlab.util.text import counted
from judging.calls import int_list
from judging.checks import check_silent, short

Matrix = list[list[float]]


def order_all(lesson: Any, matrices: Sequence[Matrix]) -> list[tuple[list[int], bool]]:
    """Order the ranks of every matrix; also return whether the matrix is unchanged."""
    orders = []
    for matrix in matrices:
        copy = [[*row] for row in matrix]
        order = int_list("ring_order", lesson.ring_order(copy))
        orders.append((order, copy == matrix))
    return orders


class Counted(float):
    """A number that counts the comparisons of all such numbers."""

    num_compared = 0

    def __lt__(self, other: Any) -> bool:
        Counted.num_compared += 1
        return float(self) < float(other)

    def __gt__(self, other: Any) -> bool:
        Counted.num_compared += 1
        return float(self) > float(other)

    def __le__(self, other: Any) -> bool:
        return not self > other

    def __ge__(self, other: Any) -> bool:
        return not self < other


def comparisons_of(lesson: Any, matrix: Matrix) -> int:
    """Return how many comparisons of seconds ``ring_order`` makes."""
    Counted.num_compared = 0
    int_list("ring_order", lesson.ring_order([[*map(Counted, row)] for row in matrix]))
    return Counted.num_compared


LEVELS = ("host", "leaf switch", "pod")
SHAPES: list[list[Any]] = [  # ranks of each host; hosts of each leaf; leaves of each pod; and so on
    *([1], [2], [1, 1], [1] * 5, [4, 1, 3]),
    *([[3, 1], [2], [2, 2, 1]], [[8, 8]] * 4),
]
NUM_DRAWN = 20  # number of trees to draw in addition to SHAPES
MOST_TIMES = 16  # limit on comparisons, in units of N²; sorting every row takes half as many
Place = tuple[int, ...]  # a rank's pod, its leaf in the pod, its host at the leaf, and so on


def _places(shape: list[Any], above: Place = ()) -> list[Place]:
    """Return the place of each rank in a tree of the given shape."""
    places = []
    for number, part in enumerate(shape):
        here = (*above, number)
        places += [here] * part if isinstance(part, int) else _places(part, here)
    return places


def _drawn(random: Random, depth: int) -> list[Any]:
    """Draw a tree of ``depth`` levels, with 1 to 3 branches per node and 1 to 4 ranks per host."""
    number = random.randint(1, 3)
    return [_drawn(random, depth - 1) if depth > 1 else random.randint(1, 4) for _ in range(number)]


def _measured(places: list[Place], random: Random, noise: float) -> Matrix:
    """Return the seconds that a message takes between any two ranks, with noise.

    The time triples with each level of the tree that the message has to climb.
    """
    depth, fastest_s = len(places[0]), 10 ** random.uniform(-6, -3)
    return [
        [
            fastest_s * 3 ** (depth - _common(place, other)) * random.uniform(1 - noise, 1 + noise)
            if i != j
            else random.choice((0.0, fastest_s, 1.0))
            for j, other in enumerate(places)
        ]
        for i, place in enumerate(places)
    ]


def _common(place: Place, other: Place) -> int:
    """Return how many levels two ranks share, counted from the top."""
    return next((k for k, (a, b) in enumerate(zip(place, other)) if a != b), len(place))  # noqa: B905


@task("3.8")
def test_each_part_of_the_tree_is_entered_once(grade: Grade) -> None:
    cases = []
    drawn = [_drawn(grade.random, grade.random.randint(1, 3)) for _ in range(NUM_DRAWN)]
    for shape, noise in product([*SHAPES, *drawn], (0.2, 0.0)):  # without noise, times are tied
        places = _places(shape)
        grade.random.shuffle(places)
        cases.append((places, _measured(places, grade.random, noise)))
    run = grade.run(order_all, 2, [matrix for _, matrix in cases])
    check_silent(run, "ring_order")
    for rank, result in enumerate(run.results):
        for (places, _), (order, is_kept) in zip(cases, result, strict=True):
            where = f"rank {rank} of 2, {_text(places)}"
            _check_permutation(where, order, len(places))
            check(is_kept, f"{where}: seconds should only be read; ring_order has changed it.")
            for level in range(len(places[0])):
                _check_crossings(where, order, places, level)


def _text(places: list[Place]) -> str:
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
    crossed = sum(part != other for part, other in zip(parts, [*parts[1:], parts[0]], strict=True))
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


@task("3.8")
def test_the_order_takes_about_n_squared_comparisons(grade: Grade) -> None:
    num_ranks, places = 60, _places([[3] * 5] * 4)
    grade.random.shuffle(places)
    num_compared = grade.call(comparisons_of, _measured(places, grade.random, 0.2))
    most = MOST_TIMES * num_ranks**2
    check_cost(
        num_compared <= most,
        f"{num_ranks} ranks: ring_order compares seconds {num_compared:,} times; N² is "
        f"{num_ranks**2:,}, and {most:,} are allowed. Look once at the row of the rank that was "
        "added last: trying where each rank would fit best, or sorting all pairs again, takes N "
        "times as long.",
    )
