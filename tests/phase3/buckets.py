"""Bodies for task 3.11."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from distlab.grade import WrongResult
from judging.calls import int_list


class Param(NamedTuple):
    """A parameter, as far as buckets know it."""

    numel: int
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def kind(self) -> tuple[str, str]:
        return self.dtype, self.device

    @property
    def num_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return self.numel * dtype.itemsize


class Case(NamedTuple):
    """What ``assign_buckets`` is called with."""

    params: tuple[Param, ...]
    bucket_bytes: int
    first_bucket_bytes: int


def assigned(lesson: Any, cases: Sequence[Case]) -> list[list[list[int]]]:
    """The buckets of every case."""
    return [_assigned(lesson, case) for case in cases]


def _assigned(lesson: Any, case: Case) -> list[list[int]]:
    params = [
        torch.empty(param.numel, dtype=getattr(torch, param.dtype), device=param.device)
        for param in case.params
    ]
    found = lesson.assign_buckets(params, case.bucket_bytes, case.first_bucket_bytes)
    if not isinstance(found, list):
        raise WrongResult(
            f"assign_buckets should return a list of lists; it returned {found!r:.60}"
        )
    return [int_list("each bucket of assign_buckets", bucket) for bucket in found]
