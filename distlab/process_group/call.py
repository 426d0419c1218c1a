"""One rank's call of a collective, in whatever form ``torch.distributed`` was called."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """One rank's part in a collective.

    Attributes:
        name: "all_reduce", a key of ``moves.MOVES``.
        must_agree: Values that must be equal on all ranks, by their name in reports.
        num_bytes: Bytes of the whole buffer, as in the cost formulas.
        inputs, outputs: Tensors of this rank. For several tensors all-gathered or
            reduce-scattered at once: the parts of the first for all ranks, then of the second, …
        root: Number of the root inside the group.
        op: Kind of reduction, if it is one.
        is_coalesced: True if it represents several calls, one for each input.
    """

    name: str
    must_agree: dict[str, object]
    num_bytes: int
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    root: int = 0
    op: Any = None
    is_coalesced: bool = False


class Form(NamedTuple):
    """Shape and dtype of a tensor for a report, without the tensor."""

    shape: torch.Size
    dtype: torch.dtype


def describe(tensor: Tensor | Form) -> str:
    """Write ``(4, 3) float32``."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
