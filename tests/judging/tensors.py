"""Tensors of many shapes and dtypes, and the bodies that all-reduce them."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7, 2), (101,), (17_001,))
DTYPES = ("float32", "float64", "int64", "uint8", "bfloat16")
KINDS = [*((shape, "float32") for shape in SHAPES), *(((7, 2), dtype) for dtype in DTYPES)]
NUMBERS: dict[str, tuple[int, int, int | float]] = {  # odd numbers from … to, times a scale
    "float64": (2**49, 2**50, 2.0**-50),
    "float32": (2**20, 2**21, 2.0**-21),
    "bfloat16": (2**4, 2**5, 2.0**-5),
    "int64": (2**58, 2**59, 1),
    "uint8": (16, 32, 1),
}
FRACTIONS = ("float32", "bfloat16", "float64")
LONG = 128  # elements; of longer tensors a digest is compared
LARGE = 1_050_000, 1_100_000  # elements, drawn between: more than 2^20, and than 2^20 bytes
EVEN = 240  # 1 to 6, 8 and 16 ranks share it evenly

Keywords = Mapping[str, Any]  # further arguments of the function
NO_KEYWORDS: Keywords = {}


def even_size(random: Random, least: int, most: int) -> int:
    """Draw a number of elements that ranks can share evenly: what is short for these alone."""
    return random.randrange(least, most) // EVEN * EVEN


def exact(shape: Sequence[int], dtype: str, seed: int) -> Tensor:
    """Numbers that need the whole width of their dtype, and sum exactly in any order on 8 ranks."""
    generator = torch.Generator().manual_seed(seed)
    low, high, scale = NUMBERS[dtype]
    odd = 2 * torch.randint(low // 2, high // 2, tuple(shape), generator=generator) + 1
    return odd.to(getattr(torch, dtype)) * scale


def tensors_of(rank: int) -> list[Tensor]:
    """One of each kind, of the rank's own numbers."""
    return [exact(*kind, seed=100 * rank + place) for place, kind in enumerate(KINDS)]


def numbers_of(tensor: Tensor) -> Any:
    """The numbers in nested lists; of a long tensor the first ones, and a digest of all."""
    if tensor.numel() <= LONG:
        return tensor.tolist()
    digest = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return [*tensor.flatten()[:3].tolist(), "…", digest[:8]]


def plain(tensors: Sequence[Tensor]) -> list[Any]:
    """The numbers of several tensors."""
    return [numbers_of(tensor) for tensor in tensors]


def sizes_of_kinds() -> Counter[int]:
    """How many of the tensors have how many bytes."""
    return Counter(tensor.numel() * tensor.element_size() for tensor in tensors_of(0))


def aliases_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Other views of the same memory: what is written in place is seen through them."""
    return [tensor.detach() for tensor in tensors]


def given_group(group: Any) -> dict[str, Any]:
    """``group=``, left out where all ranks are meant."""
    return {} if group is None else {"group": group}


def reduce_my_rank(
    lesson: Any, name: str, num_elements: int, keywords: Keywords = NO_KEYWORDS
) -> list[float]:
    """Sum a tensor of 2^rank; return its least and greatest element."""
    x = torch.full((num_elements,), float(2 ** dist.get_rank()))
    getattr(lesson, name)(x, **keywords)
    return [float(x.min()), float(x.max())]


def reduce_all_kinds(
    lesson: Any, name: str, keywords: Keywords = NO_KEYWORDS, group: Any = None
) -> list[Any]:
    """Sum every kind of tensor; return what these hold then."""
    tensors = tensors_of(dist.get_rank(group))
    memory = aliases_of(tensors)
    for tensor in tensors:
        getattr(lesson, name)(tensor, **keywords, **given_group(group))
    return plain(memory)


def reduce_fractions(
    lesson: Any, name: str, num_elements: int, keywords: Keywords = NO_KEYWORDS
) -> list[list[float]]:
    """Sum numbers whose sum depends on the order of adding, in several dtypes."""
    found = []
    for dtype in FRACTIONS:
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(num_elements, generator=generator, dtype=torch.float64)
        x = x.to(getattr(torch, dtype))
        getattr(lesson, name)(x, **keywords)
        found.append(x.tolist())
    return found
