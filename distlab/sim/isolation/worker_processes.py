"""Worker processes of data loaders, pools and executors, which end as the ranks do.

A process that ends also ends its worker processes. Ranks are threads, so a ``DataLoader`` that
keeps its workers (``persistent_workers``) would be collected later, as garbage, and by then its
queues may already be closed: torch would then wait 5 s for each process before it kills it. Pools
and executors have threads that would keep them for ever.
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


class WorkerProcesses:
    """The worker processes of a world, by what has made them."""

    def __init__(self) -> None:
        self._made: dict[type, WeakSet[Any]] = {kind: WeakSet() for kind in _ENDS}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the loaders' iterators, pools and executors that are made inside the block."""
        with contextlib.ExitStack() as until:
            for kind, made in self._made.items():
                replace_until(until, kind, "__init__", _noting(kind, made))
            yield

    def close(self) -> None:
        """End all worker processes."""
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
