"""Bodies for task 3.6: the trees alone, and the all-reduce along them."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from judging.calls import int_list, pair

DOUBLE = "double_binary_tree_all_reduce"
Trees = tuple[list[int], list[int]]


def trees_of(lesson: Any, sizes: Sequence[int]) -> list[Trees]:
    """Return the two trees of each size, as the learner makes them."""
    return [_trees(lesson, size) for size in sizes]


def _trees(lesson: Any, size: int) -> Trees:
    function = f"double_tree({size})"
    first, second = pair(function, lesson.double_tree(size), "two lists of parents")
    return int_list(function, first), int_list(function, second)


def reduce_along(lesson: Any, num_elements: int, segment_bytes: int) -> dict[str, Any]:
    """Sum a tensor of 2^rank; return its least and greatest element, and the trees."""
    trees = _trees(lesson, dist.get_world_size())
    x = torch.full((num_elements,), float(2 ** dist.get_rank()))
    lesson.double_binary_tree_all_reduce(x, segment_bytes=segment_bytes)
    return {"sums": [float(x.min()), float(x.max())], "trees": trees}


def reduce_in_segments(
    lesson: Any, segment_bytes: Sequence[int], sizes: Sequence[int]
) -> list[list[float]]:
    """Sum 1, 2, 3, … times 2^rank, with segments of several sizes, and as many numbers as given."""
    found = []
    for most_bytes, size in product(segment_bytes, sizes):
        x = torch.arange(1.0, size + 1, dtype=torch.float64) * 2 ** dist.get_rank()
        lesson.double_binary_tree_all_reduce(x, segment_bytes=most_bytes)
        found.append(x.tolist())
    return found
