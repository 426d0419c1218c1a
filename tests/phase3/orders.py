"""Bodies for tasks 3.9 and 3.10."""

from collections.abc import Sequence
from typing import Any

from judging.calls import int_list, typed
from phase3_multi_node.given import LinkCost, Topology

Matrix = list[list[float]]
Link = tuple[float, float] | None  # α and β
Case = tuple[int, tuple[str, ...], Link, Link]  # bytes, hosts, inside, between
ALGORITHMS = RING, TREE, HIERARCHICAL = "ring", "tree", "hierarchical"


def order_all(lesson: Any, matrices: Sequence[Matrix]) -> list[tuple[list[int], bool]]:
    """Order the ranks of every matrix; return also whether the matrix is as it was."""
    orders = []
    for matrix in matrices:
        copy = [[*row] for row in matrix]
        order = int_list("ring_order", lesson.ring_order(copy))
        orders.append((order, copy == matrix))
    return orders


class Counted(float):
    """A number that counts how often any of its kind is compared."""

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
    """Return how often ``ring_order`` compares seconds."""
    Counted.num_compared = 0
    int_list("ring_order", lesson.ring_order([[*map(Counted, row)] for row in matrix]))
    return Counted.num_compared


def choose_all(lesson: Any, cases: Sequence[Case]) -> list[str]:
    """Choose an algorithm in every case."""
    chosen = (lesson.choose_algorithm(case[0], _topology(case)) for case in cases)
    return [typed("choose_algorithm", name, str) for name in chosen]


def _topology(case: Case) -> Topology:
    _, hosts, inside, between = case
    return Topology(hosts, inside and LinkCost(*inside), between and LinkCost(*between))
