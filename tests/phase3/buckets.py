"""The body (a function that ranks run) for task 3.10, and parameters to put into buckets."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.grade import WrongResult
from judging.calls import int_list
from judging.pretend_device import PretendDevice

PRETENDED = "xpu:0", "xpu:1"  # two devices of the same type
UNUSED = 29  # elements of a storage that lie outside the parameter


class Param(NamedTuple):
    """A parameter's size, dtype, device and kind of memory."""

    numel: int
    dtype: str = "float32"
    device: str = "cpu"
    is_view: bool = False  # part of a larger storage
    is_same: bool = False  # the same tensor as the parameter before it

    @property
    def kind(self) -> tuple[str, str]:
        return self.dtype, self.device

    @property
    def num_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return self.numel * dtype.itemsize


class Case(NamedTuple):
    """Arguments of ``assign_buckets``."""

    params: tuple[Param, ...]
    bucket_bytes: int
    first_bucket_bytes: int


Found = tuple[list[list[int]], bool]  # buckets, and whether params kept their order


def assigned(lesson: Any, cases: Sequence[Case]) -> list[Found]:
    """Return the lesson's buckets for every case, and whether the parameters kept their order."""
    return [_assigned(lesson, case, place) for place, case in enumerate(cases)]


def _assigned(lesson: Any, case: Case, place: int) -> Found:
    made = _made(case.params)
    params = made[:] if place % 2 else tuple(made)  # alternately a list and a tuple
    with PretendDevice(PRETENDED[0]):
        assigned = lesson.assign_buckets(params, case.bucket_bytes, case.first_bucket_bytes)
    if not isinstance(assigned, list):
        raise WrongResult(
            f"assign_buckets should return a list of lists; it returned {assigned!r:.60}"
        )
    buckets = [int_list("each bucket of assign_buckets", bucket) for bucket in assigned]
    return buckets, [*map(id, params)] == [*map(id, made)]


def _made(params: Sequence[Param]) -> list[Tensor]:
    made: list[Tensor] = []
    for param in params:
        made.append(made[-1] if param.is_same else _tensor(param))
    return made


def _tensor(param: Param) -> Tensor:
    numel = param.numel + UNUSED if param.is_view else param.numel
    device = param.device if param.device in PRETENDED else PRETENDED[0]
    with PretendDevice(device):
        memory = torch.empty(numel, dtype=getattr(torch, param.dtype), device=param.device)
    return memory[: param.numel]
