"""Which bytes of a storage an operation uses, and on which stream."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from distlab.sim.gpu.streams import Stream
from distlab.sim.reporting.sites import Site


def stored(tensor: Tensor) -> Tensor:
    """Return a tensor that has a storage: for a sparse one, its values."""
    if tensor.layout is not torch.sparse_coo:
        return tensor
    with torch._C._DisableTorchDispatch():
        return tensor._values()


class Span(NamedTuple):
    """The bytes of a tensor inside its storage.

    Attributes:
        is_dense: True if the tensor covers all bytes from ``start`` to ``end``.
    """

    start: int
    end: int
    is_dense: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Span":
        tensor = stored(tensor)
        size, num_bytes = tensor.itemsize, int(tensor.nbytes)
        start = int(tensor.storage_offset()) * size
        if tensor.is_contiguous():
            return cls(start, start + num_bytes, True)
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        extent = (1 + sum(int((length - 1) * stride) for length, stride in pairs)) * size
        return cls(start, start + extent, extent == num_bytes)

    def may_meet(self, other: "Span") -> bool:
        """Return whether both may share bytes; two columns of a matrix only seem to."""
        return max(self.start, other.start) < min(self.end, other.end)

    def meets(self, other: "Span") -> bool:
        """Return whether both certainly share bytes, since one has the other's first or last."""
        return self.may_meet(other) and (self._has_end_of(other) or other._has_end_of(self))

    def _has_end_of(self, other: "Span") -> bool:
        if self.is_dense:
            return self.start <= other.start or other.end <= self.end
        return self.start == other.start or self.end == other.end

    def covers(self, other: "Span") -> bool:
        """Return whether all bytes of ``other`` are also its own; equal spans count as equal."""
        if not self.is_dense:
            return self == other
        return self.start <= other.start and self.end >= other.end


class Access(NamedTuple):
    """A use of some bytes of a storage.

    Attributes:
        number: Number of the work on its stream.
        text: Name of the operation.
    """

    stream: Stream
    number: int
    span: Span
    is_write: bool
    text: str
    site: Site

    def conflicts_with(self, earlier: "Access") -> bool:
        """Return whether both use the same bytes and one of them writes."""
        return (self.is_write or earlier.is_write) and self.span.meets(earlier.span)

    def takes_place_of(self, earlier: "Access") -> bool:
        """Return whether all that conflicts with ``earlier``, which was before, conflicts here."""
        return (self.is_write or not earlier.is_write) and self.span.covers(earlier.span)


class Operation(Protocol):
    """The parts of communication that flights use."""

    is_done: bool


class Flight(NamedTuple):
    """Communication that reads or writes a storage."""

    operation: Operation
    span: Span
    is_write: bool
    stream: Stream
    number: int
