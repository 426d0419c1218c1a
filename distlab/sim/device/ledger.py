"""The account of one rank's memory: what is held, by storage and category, and what the peak was.

Storages are what counts: a view is free, and a gradient inside a bucket belongs to the bucket. What
a storage is for may only become clear later (a sum in the backward pass becomes a gradient); it is
then moved to its category, in the account of the peak too.
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

    key: int  # id of the storage
    nbytes: int
    category: Category
    since: int  # the change of the account that gave it its size
    shape: tuple[int, ...]  # shape of the tensor for which it was made
    dtype: torch.dtype


class Account:
    """Live bytes by category, and a copy of them from the moment when there were most.

    Attributes:
        live, peak: Bytes by category.
        live_bytes, peak_bytes: Their sums.
        blocks: Live blocks by id of their storage.
    """

    def __init__(self) -> None:
        self.live: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.peak = dict(self.live)
        self.live_bytes = self.peak_bytes = 0
        self.blocks: dict[int, Block] = {}
        # A storage dies in whatever thread drops it last, at any point. Appending is atomic, so
        # the account itself is changed by one thread only, and needs no lock.
        self._dead: deque[Block] = deque()
        self._changes = self._peak_since = 0

    def find(self, storage: UntypedStorage) -> Block | None:
        """Return the block of a storage; None for memory that is not in the account."""
        self.forget_dead()  # a lookup comes next: a new storage may have the id of a dead one
        return self.blocks.get(id(storage))

    def add(self, tensor: Tensor, category: Category) -> None:
        """Enter the storage of a tensor. It leaves by itself when the storage dies."""
        storage = tensor.untyped_storage()
        block = Block(storage, self._dead.append)
        block.key, block.category, block.nbytes = id(storage), category, 0
        block.shape, block.dtype = tensor.shape, tensor.dtype
        self.blocks[block.key] = block
        self.set_size(block, storage.nbytes())

    def set_size(self, block: Block, nbytes: int) -> None:
        """Note that a storage now has this size."""
        self._changes += 1
        self.live[block.category] += nbytes - block.nbytes
        self.live_bytes += nbytes - block.nbytes
        block.nbytes, block.since = nbytes, self._changes
        self._note_peak()

    def move(self, block: Block, category: Category) -> None:
        """Change what a block is for; if it existed at the peak, change it there too."""
        self._transfer(self.live, block, category)
        if block.since <= self._peak_since:
            self._transfer(self.peak, block, category)
        block.category = category

    def restart_peak(self) -> None:
        """Forget what was held before."""
        self.peak_bytes = 0
        self._note_peak()

    def forget_dead(self) -> None:
        """Remove what has died from the account."""
        while self._dead:
            block = self._dead.popleft()
            del self.blocks[block.key]
            self.live[block.category] -= block.nbytes
            self.live_bytes -= block.nbytes

    def largest(self, count: int) -> list[tuple[Block, int]]:
        """Return the largest blocks, largest first, each with how many there are of its kind."""
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
