"""Numbers whose sum is exact in any order, and what is compared of tensors."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NUMBERS: dict[str, tuple[int, int, int | float]] = {  # odd numbers from … to, times a scale
    "float64": (2**49, 2**50, 2.0**-50),
    "float32": (2**20, 2**21, 2.0**-21),
    "bfloat16": (2**4, 2**5, 2.0**-5),
    "int64": (2**58, 2**59, 1),
    "uint8": (16, 32, 1),
}
FRACTIONS = ("float32", "bfloat16", "float64")
LONG = 128  # elements; of longer tensors a digest is compared


def exact(shape: Sequence[int], dtype: str, seed: int) -> Tensor:
    """Numbers that need the whole width of their dtype, and sum exactly in any order on 8 ranks."""
    generator = torch.Generator().manual_seed(seed)
    low, high, scale = NUMBERS[dtype]
    odd = 2 * torch.randint(low // 2, high // 2, tuple(shape), generator=generator) + 1
    return odd.to(getattr(torch, dtype)) * scale


def numbers_of(tensor: Tensor) -> Any:
    """The numbers in nested lists; of a long tensor the first ones, and a digest of all."""
    if tensor.numel() <= LONG:
        return tensor.tolist()
    digest = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return [*tensor.flatten()[:3].tolist(), "…", digest[:8]]
