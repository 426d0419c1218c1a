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


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """End the processes of all loaders that are made inside the block, when it ends."""
    made: WeakSet[Any] = WeakSet()
    make = _MultiProcessingDataLoaderIter.__init__

    def make_and_note(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        made.add(self)

    with contextlib.ExitStack() as until:
        replace_until(until, _MultiProcessingDataLoaderIter, "__init__", make_and_note)
        try:
            yield
        finally:
            for iterator in list(made):
                iterator._shutdown_workers()
