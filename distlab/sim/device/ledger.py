"""The account of one rank's memory: live bytes by storage and category, and their peak.

The account counts storages: a view is free, and a gradient inside a bucket belongs to the bucket.
The category of a storage may only become clear later (a sum in the backward pass becomes a
gradient). The storage is then moved to that category, including in the peak.
"""

from collections import deque
from typing import Literal, get_args
from weakref import ref

import torch
from torch import Tensor, UntypedStorage

Category = Literal["parameters", "gradients", "optimizer_state", "activations", "other"]
CATEGORIES: tuple[str, ...] = get_args(Category)


class Block(ref[UntypedStorage]):
    """One storage that is alive, or has just died."""

    __slots__ = ("category", "dtype", "key", "nbytes", "shape", "since")

    key: int  # id() of the storage
    nbytes: int
    category: Category
    since: int  # number of the account change that set this size
    shape: tuple[int, ...]  # shape of the tensor that it was added for
    dtype: torch.dtype


class Account:
    """Live bytes by category, and a copy of them taken at their peak.

    Attributes:
        live, peak: Bytes by category.
        live_bytes, peak_bytes: Sums over the categories.
        blocks: Live blocks, by the id of their storage.
    """

    def __init__(self) -> None:
        self.live: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.peak = dict(self.live)
        self.live_bytes = self.peak_bytes = 0
        self.blocks: dict[int, Block] = {}
        # A storage may die at any point, in the thread that drops the last reference. That thread
        # only appends the block here, which is atomic. So only one thread changes the account, and
        # no lock is needed.
        self._dead: deque[Block] = deque()
        self._changes = self._peak_since = 0

    def find(self, storage: UntypedStorage) -> Block | None:
        """Return the block of a storage, or None for memory that is not in the account."""
        self.forget_dead()  # before the lookup, as a new storage may have the id of a dead one
        return self.blocks.get(id(storage))

    def add(self, tensor: Tensor, category: Category) -> None:
        """Add a tensor's storage to the account, where it stays until the storage is freed."""
        storage = tensor.untyped_storage()
        block = Block(storage, self._dead.append)
        block.key, block.category, block.nbytes = id(storage), category, 0
        block.shape, block.dtype = tensor.shape, tensor.dtype
        self.blocks[block.key] = block
        self.set_size(block, storage.nbytes())

    def set_size(self, block: Block, nbytes: int) -> None:
        """Set the size of a block."""
        self._changes += 1
        self.live[block.category] += nbytes - block.nbytes
        self.live_bytes += nbytes - block.nbytes
        block.nbytes, block.since = nbytes, self._changes
        self._note_peak()

    def move(self, block: Block, category: Category) -> None:
        """Move a block to another category; do so in the peak too if the block existed then."""
        self._transfer(self.live, block, category)
        if block.since <= self._peak_since:
            self._transfer(self.peak, block, category)
        block.category = category

    def restart_peak(self) -> None:
        """Restart the peak from the bytes held now."""
        self.peak_bytes = 0
        self._note_peak()

    def forget_dead(self) -> None:
        """Remove dead storages from the account."""
        while self._dead:
            block = self._dead.popleft()
            del self.blocks[block.key]
            self.live[block.category] -= block.nbytes
            self.live_bytes -= block.nbytes

    def largest(self, count: int) -> list[tuple[Block, int]]:
        """Return the ``count`` largest kinds of block: one example of each, and their number."""
        kinds: dict[tuple[object, ...], list[Block]] = {}
        for block in sorted(self.blocks.values(), key=lambda block: -block.nbytes):
            kind = (block.nbytes, block.category, block.shape, block.dtype)
            kinds.setdefault(kind, []).append(block)
        return [(blocks[0], len(blocks)) for blocks in list(kinds.values())[:count]]

    def _note_peak(self) -> None:
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak = self.live_bytes, dict(self.live)
            self._peak_since = self._changes

    def _transfer(self, books: dict[str, int], block: Block, category: Category) -> None:
        books[block.category] -= block.nbytes
        books[category] += block.nbytes
