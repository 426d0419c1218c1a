"""Which GPU holds a tensor.

For torch's C++ code all tensors are on the CPU. A tensor of a GPU is one whose storage has a
``Home`` with the GPU's number, so views, ``.data`` and ``resize_`` keep their place. ``tensors``
makes torch show it: there, ``x.device`` is ``cuda:1``.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from distlab.sim.gpu.accesses import Access, Flight, stored
from distlab.sim.gpu.streams import Stream
from distlab.sim.reporting.sites import Site

_STRIDED = torch.strided


class Grave(Protocol):
    """The part of ``hazards.Grave`` that homes use."""

    def take(self, home: "Home") -> None:
        """Note that memory was freed."""


class Home:
    """The place of a storage, and what is known of its use.

    Attributes:
        index: Number of the GPU that holds it; -1 for the host's memory.
        is_pinned: True for memory of the host from which a GPU copies by itself.
        made: Line of the operation that made it, or None.
        accesses: Uses that may still be under way.
        flights: Communication that reads or writes it.
        stream: Stream on which it was allocated; None for the host's memory.
        recorded: Streams that ``record_stream`` has named.
        grave: Place that takes a note when the memory is freed, or None.
    """

    __slots__ = (
        *("accesses", "flights", "grave", "index", "is_pinned", "made"),
        *("num_bytes", "recorded", "stream"),
    )

    def __init__(self, index: int) -> None:
        self.index, self.is_pinned = index, False
        self.made: Site | None = None
        self.accesses: list[Access] = []
        self.flights: list[Flight] = []
        self.stream: Stream | None = None
        self.recorded: tuple[Stream, ...] = ()
        self.grave: Grave | None = None
        self.num_bytes = 0

    def __del__(self) -> None:
        if self.grave is not None:
            self.grave.take(self)


def home_of(tensor: Tensor) -> Home | None:
    """Return the home of a tensor's storage; None for an ordinary tensor of the host."""
    if tensor.layout is not _STRIDED:
        tensor = stored(tensor)
        if tensor.layout is not _STRIDED:
            return None
    try:
        home: Home | None = getattr(tensor.untyped_storage(), "_home", None)
    except RuntimeError:  # torch.func has wrapped it, or it is a ShardedTensor of FSDP1
        return _home_of_wrapped(tensor)
    return home


def _home_of_wrapped(tensor: Tensor) -> Home | None:
    functorch: Any = torch._C._functorch
    if not functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return home_of(functorch.get_unwrapped(tensor))


def index_of(tensor: Tensor) -> int:
    """Return the number of the GPU that holds a tensor; -1 if none does."""
    home = home_of(tensor)
    return -1 if home is None else home.index


def put_on(tensor: Tensor, index: int) -> Home | None:
    """Note that a GPU holds a tensor; return its home, or None if it has no storage of its own."""
    tensor = stored(tensor)
    if tensor.layout is not _STRIDED or tensor.is_meta:
        return None
    return _settle(tensor.untyped_storage(), Home(index))


def pin(tensor: Tensor) -> None:
    """Note that a tensor is in the host's pinned memory."""
    host_home(tensor).is_pinned = True


def host_home(tensor: Tensor) -> Home:
    """Return the home of a tensor of the host, which gets one if it has none."""
    home = home_of(tensor)
    return _settle(tensor.untyped_storage(), Home(-1)) if home is None else home


def renew(storage: UntypedStorage) -> Home | None:
    """Give an empty storage of a GPU a home without past uses; None if it is another storage."""
    home: Home | None = getattr(storage, "_home", None)
    if home is None or home.index < 0 or storage.nbytes():
        return None
    return _settle(storage, Home(home.index))


def _settle(storage: UntypedStorage, home: Home) -> Home:
    holder: Any = storage
    holder._home = home
    return home
