"""Bodies for tasks 3.9 and 3.10."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from judging.calls import int_list, typed
from phase3 import all_reduces
from phase3_multi_node.given import LinkCost, Topology, exchange, node_groups, ranks_by_host

Matrix = list[list[float]]
Link = tuple[float, float] | None  # α and β
Case = tuple[int, tuple[str, ...], Link, Link]  # bytes, hosts, inside, between
ALGORITHMS = RING, TREE, HIERARCHICAL = "ring", "tree", "hierarchical"


def order_all(lesson: Any, matrices: Sequence[Matrix]) -> list[tuple[list[int], bool]]:
    """Order the ranks of every matrix, and tell whether the matrix is as it was."""
    found = []
    for matrix in matrices:
        copy = [[*row] for row in matrix]
        order = int_list("ring_order", lesson.ring_order(copy))
        found.append((order, copy == matrix))
    return found


def reduce_in_order(lesson: Any, seconds: Matrix, num_elements: int) -> tuple[list[int], float]:
    """Sum ones around the ring that ``ring_order`` has found; return it, and the seconds."""
    order = int_list("ring_order", lesson.ring_order(seconds))
    is_ring = sorted(order) == list(range(len(seconds)))
    return order, seconds_around(None, order, num_elements) if is_ring else 0.0


def seconds_around(_: Any, order: Sequence[int], num_elements: int) -> float:
    """Sum ones around a ring of the ranks in this order; return the seconds."""
    n, position = len(order), order.index(dist.get_rank())
    right, left = order[(position + 1) % n], order[position - 1]
    chunks = torch.ones(num_elements).tensor_split(n)
    arrived = torch.empty_like(chunks[0])
    dist.barrier()
    start_s = time.perf_counter()
    for step in range(2 * (n - 1)):
        incoming = arrived[: len(chunks[(position - step - 1) % n])]
        exchange(chunks[(position - step) % n], right, incoming, left)
    return time.perf_counter() - start_s


def choose_all(lesson: Any, cases: Sequence[Case]) -> list[str]:
    """Choose an algorithm in every case."""
    chosen = (lesson.choose_algorithm(case[0], _topology(case)) for case in cases)
    return [typed("choose_algorithm", name, str) for name in chosen]


def _topology(case: Case) -> Topology:
    _, hosts, inside, between = case
    return Topology(hosts, inside and LinkCost(*inside), between and LinkCost(*between))


def time_all(
    lesson: Any, hosts: Sequence[str], inside: Link, between: Link, sizes_bytes: Sequence[int]
) -> list[tuple[str, dict[str, float]]]:
    """Choose an algorithm for every size, and return the seconds that each takes."""
    chosen = choose_all(lesson, [(size, tuple(hosts), inside, between) for size in sizes_bytes])
    nodes = ranks_by_host(hosts)
    of_node, _ = dist.new_subgroups_by_enumeration([[*ranks] for ranks in nodes])
    leaders = dist.new_group([ranks[0] for ranks in nodes])
    runs: dict[str, Callable[[Tensor], None]] = {
        RING: all_reduces.ring_all_reduce,
        TREE: lambda x: all_reduces.tree_all_reduce(x, of_node, leaders),
    }
    if len({*map(len, nodes)}) == 1:
        inside_group, across = node_groups(hosts)
        runs[HIERARCHICAL] = lambda x: all_reduces.hierarchical_all_reduce(x, inside_group, across)
    return [
        (name, {key: _seconds_of(run, size) for key, run in runs.items()})
        for name, size in zip(chosen, sizes_bytes, strict=True)
    ]


def _seconds_of(run: Callable[[Tensor], None], num_bytes: int) -> float:
    x = torch.ones(num_bytes // 4)
    dist.barrier()
    start_s = time.perf_counter()
    run(x)
    return time.perf_counter() - start_s
