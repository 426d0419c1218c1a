"""One rank's call of a collective, in one form for all variants, and counts of calls."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """One rank's part in a collective.

    Attributes:
        name: Key of ``moves.MOVES``, such as "all_reduce".
        must_agree: Values that must be equal on all ranks, keyed by their names in reports.
        num_bytes: Bytes of the whole buffer, as in the cost formulas.
        inputs, outputs: Tensors of this rank. If one call all-gathers or reduce-scatters several
            tensors, the parts of the first for all ranks come first, then those of the second, …
        root: Rank of the root inside the group.
        op: Kind of reduction, if the collective is one.
    """

    name: str
    must_agree: dict[str, object]
    num_bytes: int
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    root: int = 0
    op: Any = None

    @property
    def is_coalesced(self) -> bool:
        """True if this stands for several calls, one for each input."""
        return self.name == "all_reduce" and len(self.inputs) > 1

    @property
    def uneven_bytes(self) -> list[int]:
        """Bytes of each rank's part, if an all_gather or reduce_scatter of lists has several."""
        one, parts = self.inputs, self.outputs
        if self.name == "reduce_scatter":
            one, parts = parts, one
        elif self.name != "all_gather":
            return []
        sizes = [part.nbytes for part in parts]
        return sizes if len(one) == 1 and len({*sizes}) > 1 else []


class Form(NamedTuple):
    """The shape and dtype of a tensor, for reports that should not keep the tensor alive."""

    shape: torch.Size
    dtype: torch.dtype


def describe(tensor: Tensor | Form) -> str:
    """Return a text such as ``(4, 3) float32``."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


class Counts:
    """Numbers of calls and bytes, by name of the collective.

    Bytes are the sizes of tensors, as in the cost formulas; an all_gather counts the whole buffer.
    The resulting traffic depends on the algorithm. To send objects, ``torch.distributed`` calls
    two collectives, the first for their sizes, and both count.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def __sub__(self, earlier: "Counts") -> "Counts":
        difference = Counts()
        difference.calls = self.calls - earlier.calls
        difference.num_bytes = self.num_bytes - earlier.num_bytes
        return difference

    def __copy__(self) -> "Counts":
        return self - Counts()

    def add(self, call: Call) -> None:
        """Count a call."""
        self.calls[call.name] += 1
        self.num_bytes[call.name] += call.num_bytes
