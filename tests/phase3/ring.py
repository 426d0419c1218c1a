"""Bodies for tasks 3.1 to 3.4."""

from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from judging.calls import typed
from judging.tensors import FRACTIONS, exact, numbers_of

SCATTER, GATHER = "ring_reduce_scatter", "ring_all_gather"
REDUCE, SEGMENTED = "ring_all_reduce", "segmented_ring_all_reduce"
SHAPES: tuple[tuple[int, ...], ...] = ((120,), (101,), (), (0,), (1,), (3,))
DTYPES = ("float32", "float64", "int64", "uint8", "bfloat16")
KINDS = [*((shape, "float32") for shape in SHAPES), *(((7, 2), dtype) for dtype in DTYPES)]
OVERWRITTEN = 77  # what the caller writes into x at once


def uneven_size(random: Random) -> int:
    """Draw a number of elements that neither 2, 3, 4, 5 nor 8 ranks can share evenly."""
    return 120 * random.randrange(300, 700) + random.choice((7, 11, 13, 17, 19, 23))


def tensors_of(rank: int) -> list[Tensor]:
    """What a rank brings: numbers that sum exactly in any order."""
    return [exact(*kind, seed=100 * rank + place) for place, kind in enumerate(KINDS)]


def powers(num_elements: int) -> Tensor:
    """2^rank, times 1 to 7 by place, so that parts that come to another place are seen."""
    x = torch.arange(num_elements, dtype=torch.float32)
    return x.remainder_(7).add_(1).mul_(2.0 ** dist.get_rank())


def without_places(x: Tensor, begin: int = 0) -> list[float]:
    """Least and greatest number, divided by what ``powers`` multiplies with; none of an empty x."""
    places = torch.arange(begin, begin + len(x)).remainder_(7).add_(1)
    return [float((x / places).min()), float((x / places).max())] if len(x) else []


def chunk_of(x: Tensor, rank: int, world_size: int) -> Tensor:
    return x.view(-1).tensor_split(world_size)[rank]


# 3.1


def scatter_all_kinds(lesson: Any, group: Any = None) -> list[dict[str, Any]]:
    """Reduce-scatter every kind of tensor; overwrite it at once."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    found = []
    for x in tensors_of(rank):
        chunk = typed(SCATTER, lesson.ring_reduce_scatter(x, **_given(group)), Tensor)
        entry = {"chunk": numbers_of(chunk), "shape": [*chunk.shape], "dtype": str(chunk.dtype)}
        entry["is_view"] = chunk.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        found.append({**entry, "in_x": numbers_of(chunk_of(x, rank, world_size))})
        x.fill_(OVERWRITTEN)
    dist.barrier(group)
    return found


def scatter_my_rank(lesson: Any, num_elements: int) -> list[float]:
    """Reduce-scatter powers of two; return least and greatest number of the chunk."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunk = typed(SCATTER, lesson.ring_reduce_scatter(powers(num_elements)), Tensor)
    before = torch.empty(num_elements).tensor_split(world_size)[:rank]
    return without_places(chunk.flatten(), sum(map(len, before)))


# 3.2


def gather_all_kinds(lesson: Any, group: Any = None) -> list[Any]:
    """All-gather every kind of tensor; overwrite it at once."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    found = []
    for x, whole in zip(tensors_of(1 + rank), tensors_of(0), strict=True):
        chunk_of(x, rank, world_size).copy_(chunk_of(whole, rank, world_size))
        memory = x.detach()
        lesson.ring_all_gather(x, **_given(group))
        found.append(numbers_of(memory))
        memory.fill_(OVERWRITTEN)
    dist.barrier(group)
    return found


def gather_my_rank(lesson: Any, num_elements: int) -> list[list[float]]:
    """All-gather chunks of the ranks' numbers, with -1 elsewhere; return what each chunk holds."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.full((num_elements,), -1.0)
    chunk_of(x, rank, world_size).fill_(rank)
    lesson.ring_all_gather(x)
    return [sorted({float(c.min()), float(c.max())}) for c in x.tensor_split(world_size)]


# 3.3 and 3.4


def reduce_all_kinds(
    lesson: Any, function: str, segment_bytes: int = 0, group: Any = None
) -> list[Any]:
    """Sum every kind of tensor; overwrite it at once."""
    found = []
    for x in tensors_of(dist.get_rank(group)):
        memory = x.detach()
        getattr(lesson, function)(x, **_given(group), **_segments(segment_bytes))
        found.append(numbers_of(memory))
        memory.fill_(OVERWRITTEN)
    dist.barrier(group)
    return found


def reduce_my_rank(
    lesson: Any, function: str, num_elements: int, segment_bytes: int = 0
) -> list[float]:
    """Sum powers of two; return least and greatest number."""
    x = powers(num_elements)
    getattr(lesson, function)(x, **_segments(segment_bytes))
    return without_places(x)


def reduce_fractions(
    lesson: Any, function: str, num_elements: int, segment_bytes: int = 0
) -> list[list[float]]:
    """Sum numbers whose sum depends on the order of adding, in several dtypes."""
    found = []
    for dtype in FRACTIONS:
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(num_elements, generator=generator, dtype=torch.float64)
        x = x.to(getattr(torch, dtype))
        getattr(lesson, function)(x, **_segments(segment_bytes))
        found.append(x.tolist())
    return found


def use_unwritten(lesson: Any, function: str, num_elements: int, segment_bytes: int = 0) -> None:
    """Call it with whatever is in memory: nothing else takes memory, or time on a device."""
    getattr(lesson, function)(torch.empty(num_elements), **_segments(segment_bytes))


def _given(group: Any) -> dict[str, Any]:
    """``group=``, left out where all ranks are meant."""
    return {} if group is None else {"group": group}


def _segments(segment_bytes: int) -> dict[str, int]:
    """``segment_bytes=``, left out where the function takes none, or its default is meant."""
    return {"segment_bytes": segment_bytes} if segment_bytes else {}
