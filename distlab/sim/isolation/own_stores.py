"""Stores that a program makes itself: ranks that name one port or file share a simulated store."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from distlab.sim.messages.store import SimStore
from distlab.util.replacing import Replace

_JOINED, _COMPLETE = "distlab/joined", "distlab/complete"


class OwnStores:
    """The stores that a world's ranks have made.

    Args:
        make_store: Function that returns an empty store.
        is_in_rank: Function that returns whether the calling thread belongs to a rank.
    """

    def __init__(self, make_store: Callable[[], SimStore], is_in_rank: Callable[[], bool]) -> None:
        self._make_store, self._is_in_rank = make_store, is_in_rank
        self._stores: dict[object, SimStore] = {}

    def install(self, replace: Replace) -> None:
        """Make ranks get simulated stores; other threads get torch's."""
        for name, make in (
            ("TCPStore", self._at_port),
            ("FileStore", self._in_file),
            ("HashStore", self._make_store),
        ):
            replace(dist, name, _on_ranks(getattr(dist, name), make, self._is_in_rank))

    def _at_port(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta | None = None,
        wait_for_workers: bool = True,
        **_: object,
    ) -> Store:
        """Return the store at a port; unless told otherwise, wait until all ranks have made it."""
        store = self._shared(("port", port), timeout)
        vars(store).update(host=host_name, port=port)
        if world_size and wait_for_workers:
            if store.add(_JOINED, 1) == world_size:
                store.set(_COMPLETE, "1")
            store.wait([_COMPLETE])
        return store

    def _in_file(self, file_name: str, world_size: int = -1) -> Store:
        return self._shared(("file", file_name), None)

    def _shared(self, place: object, timeout: timedelta | None) -> SimStore:
        store = self._stores.setdefault(place, self._make_store())
        if timeout is not None:
            store.set_timeout(timeout)
        return store


def _on_ranks(real: Any, make: Callable[..., Store], is_in_rank: Callable[[], bool]) -> Any:
    """Return a class that makes stores by ``make`` on ranks, and ``real`` ones elsewhere."""

    class OnRanks(real):  # type: ignore[misc]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return (make if is_in_rank() else real)(*args, **kwargs)

    OnRanks.__name__ = OnRanks.__qualname__ = real.__name__
    return OnRanks
