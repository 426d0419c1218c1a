"""Bodies for task 3.8."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from judging.calls import cause_told
from judging.tensors import FRACTIONS, KINDS, NUMBERS, Kind, exact, plain
from phase3 import all_reduces
from phase3_multi_node.given import Group, node_groups

NOTED_KINDS = [Kind((13,), dtype) for dtype in NUMBERS]
STEPS = [["reduce_scatter", "inside"], ["all_reduce", "across"], ["all_gather", "inside"]]
NotedCall = tuple[str, str, str, int]  # function, group, dtype, number of elements
OUTER_NODES = (1, 2), (4, 5)  # ranks of the world
OUTER_WORLD_SIZE = 6
FUNCTIONS = TORCH, RINGS = "torch's functions", "rings"  # that the function is made of


def reduce_kinds(
    lesson: Any, hosts: Sequence[str], functions: Sequence[str]
) -> dict[str, list[Any]]:
    """Sum a tensor of every kind with each of the functions."""
    return _reduced_kinds(lesson, *node_groups(hosts), functions, dist.get_rank())


def _reduced_kinds(
    lesson: Any, inside: Group, across: Group, functions: Sequence[str], rank: int
) -> dict[str, list[Any]]:
    sums = {}
    for name in functions:
        tensors = [exact(kind, rank) for kind in KINDS]
        for x in tensors:
            functions_given = all_reduces.RINGS if name == RINGS else {}
            lesson.hierarchical_all_reduce(x, inside, across, **functions_given)
        sums[name] = plain(tensors)
    return sums


def note_calls(lesson: Any, hosts: Sequence[str]) -> list[list[NotedCall]]:
    """Return how the functions that are passed were called, for a tensor of each kind.

    They take the tensor by position, as the types of given.py say. Calls with an empty tensor do
    not count.
    """
    groups = dict(zip(("inside", "across"), node_groups(hosts), strict=True))
    calls: list[NotedCall] = []

    def noting(name: str, call: Any) -> Any:
        def noted(x: Tensor, /, group: Group = None) -> Any:
            of = next((key for key, value in groups.items() if value is group), "another group")
            if x.numel():
                calls.append((name, of, str(x.dtype).removeprefix("torch."), x.numel()))
            return call(x, group)

        return noted

    functions = {name: noting(name, call) for name, call in all_reduces.RINGS.items()}
    by_kind = []
    with cause_told(BY_POSITION, TypeError):
        for kind in NOTED_KINDS:
            lesson.hierarchical_all_reduce(
                exact(kind, dist.get_rank()), *groups.values(), **functions
            )
            by_kind.append([*calls])
            calls.clear()
    return by_kind


BY_POSITION = {
    "positional-only": "The functions that are passed take the tensor by position, "
    "all_reduce(chunk, across): one of your own may call it something other than x."
}


def reduce_kinds_of_members(lesson: Any) -> dict[str, list[Any]] | None:
    """Do as ``reduce_kinds`` on two nodes that are only a part of the world."""
    insides = [dist.new_group([*ranks]) for ranks in OUTER_NODES]
    acrosses = [dist.new_group([*ranks]) for ranks in zip(*OUTER_NODES, strict=True)]
    members = [rank for node in OUTER_NODES for rank in node]
    for node, inside in zip(OUTER_NODES, insides, strict=True):
        if (rank := dist.get_rank()) in node:
            across = acrosses[node.index(rank)]
            return _reduced_kinds(lesson, inside, across, [RINGS], members.index(rank))
    return None


def time_one(lesson: Any, hosts: Sequence[str], num_elements: int) -> list[float]:
    """Sum ones by rings; return the seconds, and the least and the greatest result."""
    inside, across = node_groups(hosts)
    x = torch.ones(num_elements)
    dist.barrier()
    start_s = time.perf_counter()
    lesson.hierarchical_all_reduce(x, inside, across, **all_reduces.RINGS)
    return [time.perf_counter() - start_s, x.min().item(), x.max().item()]


def reduce_fractions(lesson: Any, hosts: Sequence[str]) -> list[list[float]]:
    """Sum numbers that round, in every dtype, by torch's functions."""
    inside, across = node_groups(hosts)
    generator = torch.Generator().manual_seed(dist.get_rank())
    sums = [torch.rand(501, generator=generator).to(getattr(torch, dtype)) for dtype in FRACTIONS]
    for x in sums:
        lesson.hierarchical_all_reduce(x, inside, across)
    return [x.tolist() for x in sums]
