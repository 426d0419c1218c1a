"""Bodies for tasks 1.4 to 1.7."""

import time
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from judging.tensors import FRACTIONS, exact, numbers_of

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7, 2), (101,), (17_001,))
DTYPES = ("float32", "float64", "int64", "uint8", "bfloat16")
KINDS = [*((shape, "float32") for shape in SHAPES), *(((7, 2), dtype) for dtype in DTYPES)]
LARGE = 1_050_000, 1_100_000  # elements, drawn between: more than 2^20, and than 2^20 bytes
EVEN = 240  # 1 to 6, 8 and 16 ranks share it evenly


def even_size(random: Random, least: int, most: int) -> int:
    """Draw a number of elements that ranks can share evenly: what is short for these alone."""
    return random.randrange(least, most) // EVEN * EVEN


def tensors_of(rank: int) -> list[Tensor]:
    """Numbers that need the whole width of their dtype, and sum exactly in any order on 8 ranks."""
    return [exact(*kind, seed=100 * rank + place) for place, kind in enumerate(KINDS)]


def plain(tensors: Sequence[Tensor]) -> list[Any]:
    return [numbers_of(tensor) for tensor in tensors]


def sizes_of_kinds() -> Counter[int]:
    """How many of the tensors have how many bytes."""
    return Counter(tensor.numel() * tensor.element_size() for tensor in tensors_of(0))


# 1.4


def exchange_all_kinds(
    lesson: Any, dsts: Sequence[int], are_alike: bool, group: Any = None
) -> dict[str, list[Any]]:
    """Send every kind of tensor to ``dsts[rank]``; return what both tensors hold.

    All ranks send the same kind, or in step i rank r kind i + r, so that what leaves and what
    arrives differ in kind.
    """
    rank, num_kinds = dist.get_rank(group), len(KINDS)
    src, mine = dsts.index(rank), tensors_of(rank)
    others = [torch.zeros_like(tensor) for tensor in mine]
    memory = _aliases(others)
    for i in range(num_kinds):
        out, into = (i if are_alike else (i + r) % num_kinds for r in (rank, src))
        lesson.exchange(mine[out], dsts[rank], others[into], src, **_given(group))
    return {"incoming": plain(memory), "outgoing": plain(mine)}


def _aliases(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Other views of the same memory: what is written in place is seen through them."""
    return [tensor.detach() for tensor in tensors]


def exchange_once(lesson: Any, dsts: Sequence[int], lengths: Sequence[int]) -> None:
    """Send as many numbers as the rank's length says, once."""
    rank = dist.get_rank()
    src = dsts.index(rank)
    outgoing, incoming = torch.zeros(lengths[rank]), torch.zeros(lengths[src])
    lesson.exchange(outgoing, dsts[rank], incoming, src)


def exchange_then_write(lesson: Any) -> list[float]:
    """Overwrite what was sent as soon as exchange returns, while one rank comes late.

    Returns:
        What the incoming tensor holds at once, and later.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = torch.full((4,), float(rank)), torch.full((4,), -1.0)
    if rank == size - 1:
        time.sleep(0.01)
    lesson.exchange(outgoing, (rank + 1) % size, incoming, (rank - 1) % size)
    at_once = float(incoming.mean())
    outgoing.fill_(-99.0)
    dist.barrier()
    return [at_once, float(incoming.mean())]


# 1.5 to 1.7


def broadcast_from(lesson: Any, src: int, num_elements: int) -> float:
    x = torch.full((num_elements,), float(dist.get_rank()))
    lesson.broadcast(x, src)
    return float(x.mean())


def broadcast_all_kinds(lesson: Any, group: Any = None) -> list[Any]:
    """From every rank in turn, every kind of tensor; what may be left out is left out."""
    arrived = []
    for src in range(dist.get_world_size(group)):
        tensors = tensors_of(dist.get_rank(group))
        memory = _aliases(tensors)
        for tensor in tensors:
            if src == 0:
                lesson.broadcast(tensor, **_given(group))
            else:
                lesson.broadcast(tensor, src, group)
        arrived.append(plain(memory))
    return arrived


def broadcast_twice(lesson: Any, late: int, srcs: Sequence[int]) -> list[float]:
    """Broadcast from two ranks, one after the other, while one rank comes late."""
    rank = dist.get_rank()
    if rank == late:
        time.sleep(0.01)
    held = []
    for i, src in enumerate(srcs):
        x = torch.tensor(float(10 * i + rank))
        lesson.broadcast(x, src)
        held.append(float(x))
    return held


def reduce_my_rank(lesson: Any, name: str, num_elements: int) -> list[float]:
    """Sum a tensor of the rank's number; return least and greatest element."""
    x = torch.full((num_elements,), float(2 ** dist.get_rank()))
    getattr(lesson, name)(x)
    return [float(x.min()), float(x.max())]


def reduce_all_kinds(lesson: Any, name: str, group: Any = None) -> list[Any]:
    tensors = tensors_of(dist.get_rank(group))
    memory = _aliases(tensors)
    for tensor in tensors:
        getattr(lesson, name)(tensor, **_given(group))
    return plain(memory)


def reduce_fractions(lesson: Any, name: str, num_elements: int) -> list[list[float]]:
    """Sum numbers whose sum depends on the order of adding, in several dtypes."""
    found = []
    for dtype in FRACTIONS:
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(num_elements, generator=generator, dtype=torch.float64)
        x = x.to(getattr(torch, dtype))
        getattr(lesson, name)(x)
        found.append(x.tolist())
    return found


def _given(group: Any) -> dict[str, Any]:
    """``group=``, left out where all ranks are meant."""
    return {} if group is None else {"group": group}
