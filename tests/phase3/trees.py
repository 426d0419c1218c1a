"""Bodies for task 3.6: the trees alone, and an all-reduce that also returns its trees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from judging.calls import int_list, pair
from judging.collective import AllReduce, Numbers
from judging.tensors import Kind

Trees = tuple[list[int], list[int]]


def trees_of(lesson: Any, sizes: Sequence[int]) -> list[Trees]:
    """Return the two trees of each size, as the learner makes them."""
    return [_trees(lesson, size) for size in sizes]


def _trees(lesson: Any, size: int) -> Trees:
    function = f"double_tree({size})"
    first, second = pair(function, lesson.double_tree(size), "two lists of parents")
    return int_list(function, first), int_list(function, second)


@dataclass(frozen=True)
class AlongTrees(AllReduce):
    """An all-reduce that also returns the learner's trees, to judge its messages by."""

    def call(self, lesson: Any, x: Tensor, group: Any) -> Any:
        super().call(lesson, x, group)
        return _trees(lesson, dist.get_world_size(group))

    def found(self, x: Tensor, returned: Any, rank: int, n: int) -> Any:
        return {"sum": super().found(x, None, rank, n), "trees": returned}

    def check(self, by_rank: Sequence[Any], kind: Kind, numbers: Numbers, where: str) -> None:
        super().check([found["sum"] for found in by_rank], kind, numbers, where)
