"""Loader processes and pools that ranks leave behind, which end as the ranks do.

A process that ends ends its loaders' processes at once. Ranks are threads, so a ``DataLoader`` that
keeps its processes (``persistent_workers``) would be collected later, as garbage, and by then its
queues may already be closed: torch would then wait 5 s for each process before it kills it. Pools
of processes have threads that would keep them for ever.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.pool import Pool
from typing import Any
from weakref import WeakSet

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from distlab.util.replacing import replace_until


def _end_executor(executor: Any) -> None:
    """End an executor and its processes, whatever they compute."""
    for process in [*(executor._processes or {}).values()]:
        process.terminate()
    executor.shutdown(cancel_futures=True)


_ENDS: dict[type, Callable[[Any], object]] = {  # as Python ends them when a process ends
    _MultiProcessingDataLoaderIter: _MultiProcessingDataLoaderIter._shutdown_workers,
    Pool: Pool.terminate,
    ProcessPoolExecutor: _end_executor,
}


class Loaders:
    """The iterators of a world that load in processes, and its pools of processes."""

    def __init__(self) -> None:
        self._made: dict[type, WeakSet[Any]] = {kind: WeakSet() for kind in _ENDS}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the iterators and pools that are made inside the block."""
        with contextlib.ExitStack() as until:
            for kind, made in self._made.items():
                replace_until(until, kind, "__init__", _noting(kind, made))
            yield

    def close(self) -> None:
        """End the processes of all iterators and pools."""
        for kind, made in self._made.items():
            for maker in list(made):
                _ENDS[kind](maker)


def _noting(kind: Any, made: WeakSet[Any]) -> Callable[..., None]:
    """Return the constructor of a class, followed by a note of what it has made."""
    make = kind.__init__

    def make_and_note(maker: Any, *args: Any, **options: Any) -> None:
        make(maker, *args, **options)
        made.add(maker)

    return make_and_note
