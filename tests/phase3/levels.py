"""Bodies for task 3.8."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phase3 import all_reduces
from phase3_multi_node.given import Group, node_groups

Kind = tuple[tuple[int, ...], str]  # shape and dtype
KINDS: tuple[Kind, ...] = (
    ((3, 5), "float32"),
    ((), "float64"),
    ((1,), "int64"),
    ((7,), "bfloat16"),
    ((2, 9), "float16"),
    ((0,), "float32"),
)
OUTER_NODES = (1, 2), (4, 5)  # of a world of OUTER_WORLD_SIZE ranks
OUTER_WORLD_SIZE = 6
FRACTIONS = ("float32", "bfloat16")
FUNCTIONS = TORCH, RINGS = "torch's functions", "rings"  # that the function is made of


def tensor_of(kind: Kind, rank: int) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    shape, dtype = kind
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 10, shape, generator=generator).to(getattr(torch, dtype))


def reduce_kinds(
    lesson: Any, hosts: Sequence[str], functions: Sequence[str]
) -> dict[str, list[Any]]:
    """Sum a tensor of every kind with each of the functions."""
    return _reduced_kinds(lesson, *node_groups(hosts), functions)


def _reduced_kinds(
    lesson: Any, inside: Group, across: Group, functions: Sequence[str]
) -> dict[str, list[Any]]:
    sums = {}
    for name in functions:
        tensors = [tensor_of(kind, dist.get_rank()) for kind in KINDS]
        for x in tensors:
            lesson.hierarchical_all_reduce(x, inside, across, **functions_of(name))
        sums[name] = [x.tolist() for x in tensors]
    return sums


def functions_of(name: str) -> dict[str, Any]:
    """The arguments that make the function use torch's functions, or rings."""
    return all_reduces.RINGS if name == RINGS else {}


def reduce_kinds_of_members(lesson: Any) -> dict[str, list[Any]] | None:
    """Do as ``reduce_kinds`` on two nodes that are only a part of the world."""
    insides = [dist.new_group([*ranks]) for ranks in OUTER_NODES]
    acrosses = [dist.new_group([*ranks]) for ranks in zip(*OUTER_NODES, strict=True)]
    for node, inside in zip(OUTER_NODES, insides, strict=True):
        if dist.get_rank() in node:
            across = acrosses[node.index(dist.get_rank())]
            return _reduced_kinds(lesson, inside, across, [RINGS])
    return None


def time_one(lesson: Any, hosts: Sequence[str], num_elements: int, functions: str) -> list[float]:
    """Sum ones; return the seconds, and the least and the greatest number that came out."""
    inside, across = node_groups(hosts)
    x = torch.ones(num_elements)
    dist.barrier()
    start_s = time.perf_counter()
    lesson.hierarchical_all_reduce(x, inside, across, **functions_of(functions))
    return [time.perf_counter() - start_s, x.min().item(), x.max().item()]


def reduce_fractions(
    lesson: Any, hosts: Sequence[str], functions: Sequence[str]
) -> dict[str, list[float]]:
    """Sum numbers that round, in every dtype, with each of the functions."""
    inside, across = node_groups(hosts)
    generator = torch.Generator().manual_seed(dist.get_rank())
    sums = {}
    for name in functions:
        for dtype in FRACTIONS:
            x = torch.rand(501, generator=generator).to(getattr(torch, dtype))
            lesson.hierarchical_all_reduce(x, inside, across, **functions_of(name))
            sums[f"{name}, {dtype}"] = x.tolist()
    return sums
