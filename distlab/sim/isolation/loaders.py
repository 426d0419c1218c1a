"""Loader processes that ranks leave behind, which end as the ranks do.

A process that ends ends its loaders' processes at once. Ranks are threads, so a ``DataLoader`` that
keeps its processes (``persistent_workers``) would be collected later, as garbage, and by then its
queues may already be closed: torch would then wait 5 s for each process before it kills it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from distlab.util.replacing import replace_until


class Loaders:
    """The iterators of a world that load in processes."""

    def __init__(self) -> None:
        self._made: WeakSet[Any] = WeakSet()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the iterators that are made inside the block."""
        make = _MultiProcessingDataLoaderIter.__init__

        def make_and_note(iterator: Any, *args: Any, **options: Any) -> None:
            make(iterator, *args, **options)
            self._made.add(iterator)

        with contextlib.ExitStack() as until:
            replace_until(until, _MultiProcessingDataLoaderIter, "__init__", make_and_note)
            yield

    def close(self) -> None:
        """End the processes of all iterators."""
        for iterator in list(self._made):
            iterator._shutdown_workers()
