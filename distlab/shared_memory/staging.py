"""The staging area, through which tensors outside shared memory pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

STAGE_BYTES = 96 * 2**20  # in total; with smaller pieces, waiting takes longer than copying
SLOTS = 3  # at any time, one is filled, one is summed, and one is read
LINE_BYTES = 64  # a cache line; two ranks never write to the same one


def block_bytes_for(world_size: int) -> int:
    """Return the size of a block; in each slot, every rank has a block for each rank's chunk."""
    return max(1, STAGE_BYTES // (SLOTS * world_size**2 * LINE_BYTES)) * LINE_BYTES


class Stage:
    """Blocks of memory that all ranks have mapped, viewed in any dtype.

    rank r's part, N = 2:   slot 0: chunk 0, chunk 1   slot 1: chunk 0, chunk 1   slot 2: …

    Attributes:
        block_bytes: Size of a block, and of a piece of a chunk.
    """

    def __init__(self, parts: Sequence[Tensor], block_bytes: int) -> None:
        """Lay the blocks out in ``parts``, one for each rank."""
        self.block_bytes = block_bytes
        shape = SLOTS, len(parts), block_bytes
        self._parts = [part[: SLOTS * len(parts) * block_bytes].view(shape) for part in parts]
        self._typed: dict[torch.dtype, list[Tensor]] = {}

    def part(self, chunk: Tensor, piece: int) -> Tensor:
        """Return a piece of a chunk: as much as a block holds, or what is left."""
        size = self.block_bytes // chunk.element_size()
        return chunk[piece * size : (piece + 1) * size]

    def block(self, rank: int, slot: int, chunk: int, part: Tensor) -> Tensor:
        """Return the memory in which ``rank`` puts a part of a chunk."""
        return self._of(part.dtype)[rank][slot, chunk, : len(part)]

    def whole(self, rank: int, slot: int, x: Tensor) -> Tensor:
        """Return the memory in which ``rank`` puts all of a small tensor."""
        return self._of(x.dtype)[rank][slot].view(-1)[: len(x)]

    def _of(self, dtype: torch.dtype) -> list[Tensor]:
        """Return each rank's slots, viewed in a dtype; the views are kept for later calls."""
        if dtype not in self._typed:
            self._typed[dtype] = [part.view(dtype) for part in self._parts]
        return self._typed[dtype]
