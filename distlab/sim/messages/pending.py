"""An operation in flight: posted by one rank, and done some virtual time later."""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distlab.sim.engine.clock import Clock
from distlab.sim.engine.scheduler import NEVER, Strand
from distlab.sim.messages import limits
from distlab.sim.reporting.report import Row, mismatch, place
from distlab.sim.reporting.sites import CallSite

ANY_SOURCE = -1  # the peer of a recv from any rank


class Pending:
    """One rank's side of a communication.

    Attributes:
        rank: Global number of the rank that posted it.
        name: "send", "recv", "all_reduce".
        group: Global numbers of the group's ranks.
        num_bytes: Bytes of this rank's tensors.
        posted_s: Virtual time of the call.
        done_s: Virtual time of the end, once ``is_done``.
        error: Reason of its failure, or None.
        site: File, line and function of the call.
        is_by_torch: True if torch made the call by itself, and keeps the handle.
        maker: Function of torch that has made it; "" if the program has called it by its name.
    """

    __slots__ = (
        *("done_s", "group", "is_by_torch", "is_done", "name", "num_bytes"),
        *("clock", "error", "maker", "posted_s", "rank", "site", "waiters"),
    )
    kind = "collective"  # or "send", "recv", "founding", "store", "thread"
    is_recorded = True  # once it is done; waiting for it is recorded anyway
    peer = -1  # global rank of the other side, of a message
    number = -1  # number of the message

    def __init__(
        self, clock: Clock, name: str, group: tuple[int, ...], num_bytes: int, call: CallSite
    ) -> None:
        rank = clock.scheduler.current
        self.clock = clock
        self.rank = rank.number
        self.name = name
        self.group = group
        self.num_bytes = num_bytes
        self.posted_s = rank.clock_s
        self.done_s = 0.0
        self.is_done = False
        self.site, self.is_by_torch, self.maker = call
        self.waiters: tuple[Strand, ...] = ()
        self.error: Exception | None = None

    def finish(self, at_s: float) -> None:
        """Mark it done, record it, and let its rank continue if it waits."""
        self.is_done = True
        self.done_s = at_s
        if self.is_recorded:
            self.clock.trace.record(self)
        for waiter in self.waiters:
            self.clock.ready(waiter, at_s)

    def fail(self, error: Exception, at_s: float) -> None:
        """Let who waits for it, or will, get an error."""
        self.error, self.is_done, self.done_s = error, True, at_s
        for waiter in self.waiters:
            self.clock.ready(waiter, at_s)

    def wait(self, limit_s: float = NEVER, group_limit_s: float = NEVER) -> None:
        """Block the running rank until it is done; its clock is then at that time or later.

        Args:
            limit_s: Longest time that the rank waits.
            group_limit_s: Longest time that the operation may take.

        Raises:
            Exception: it has failed, or was not done in time.
        """
        clock = self.clock
        rank = clock.scheduler.current
        start_s = rank.clock_s
        if not self.is_done and not self.block(start_s + min(limit_s, group_limit_s)):
            clock.gave_up(self)
            raise self.late(limit_s) if limit_s <= group_limit_s else self.expired(group_limit_s)
        if self.done_s > rank.clock_s:
            rank.clock_s = self.done_s
        if clock.loses_time:
            start_s = clock.settle(start_s)
        if rank.clock_s > start_s:
            clock.waited(self.name, self.site, start_s)
        if self.error is not None:
            raise self.error

    def block(self, until_s: float = NEVER) -> bool:
        """Let others run until it is done, which may move the running rank's clock.

        Returns:
            Whether it was done by then.
        """
        if self.is_done:
            return True
        me = self.clock.scheduler.current
        self.waiters = (*self.waiters, me)
        is_in_time = self.clock.block(self, until_s)
        if not self.is_done:  # after its end no waiter is woken any more
            self.waiters = tuple(other for other in self.waiters if other is not me)
        return is_in_time

    def late(self, limit_s: float) -> Exception:
        """Return the error for a rank that waits no longer."""
        return self.expired(limit_s)

    def expired(self, limit_s: float) -> Exception:
        """End it, because it has taken too long; return the error."""
        return limits.operation_error(
            self.rank, self.name, limit_s, f"{self.text()}, {self.where()}"
        )

    def check_unchanged(self, tensor: Tensor, before: Tensor) -> None:
        """Raise if one of its tensors was written while it was under way.

        Raises:
            Mismatch: it was.
        """
        if tensor.is_meta or tensor.is_sparse or same_bytes(tensor.detach(), before):
            return
        raise mismatch(
            "buffer changed",
            f"rank {self.rank} changed the tensor of its {self.name} before wait() had returned",
            [self.row()],
            "Until then the network may still read it.",
        )

    def waits_for(self) -> Sequence[int]:
        """Global ranks that have yet to do their part."""
        raise NotImplementedError

    def title(self) -> str:
        """Write which call it is, for a sentence: ``recv``."""
        return self.full_name()

    def full_name(self) -> str:
        """Write ``broadcast``, or ``broadcast_object_list's broadcast`` if that has made it."""
        return f"{self.maker}'s {self.name}" if self.maker else self.name

    def text(self) -> str:
        """Write what was called, for a report: ``recv from rank 2, (4,) float32``."""
        raise NotImplementedError

    def where(self) -> str:
        """Write ``ring.py:41 in exchange``."""
        return place(self.site)

    def row(self) -> Row:
        """Return its line of a report."""
        return Row((self.rank,), self.text(), self.where())


Quiet = Callable[[], contextlib.AbstractContextManager[object]]
_NOTHING = contextlib.nullcontext()


class Buffers:
    """The simulator's own copies of the tensors of ranks, which cost the ranks nothing.

    Args:
        is_strict: True if the buffers of operations under way are watched.
        unnoticed: Maker of a context that keeps operations out of the running rank's account, or
            None.

    Attributes:
        unnoticed: The same, for other code that handles tensors.
        copy: Function that writes its second argument to its first.
    """

    def __init__(self, *, is_strict: bool, unnoticed: Quiet | None) -> None:
        self.is_strict = is_strict
        self.unnoticed: Quiet = unnoticed or (lambda: _NOTHING)
        self.copy = _copy if unnoticed is None else self._copy_unnoticed

    def copied(self, tensor: Tensor) -> Tensor:
        """Copy a tensor as it is now."""
        with self.unnoticed():
            return tensor.detach().clone()

    def _copy_unnoticed(self, output: Tensor, value: Tensor) -> None:
        with self.unnoticed():
            _copy(output, value)


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """Compare bit by bit, so that a NaN that has not changed is equal to itself."""
    return torch.equal(_bytes(x), _bytes(y))


def _bytes(x: Tensor) -> Tensor:
    flat = (
        x.detach().contiguous().view(-1)
    )  # a tensor without dims has no last one to view as bytes
    if flat.numel() == 1:  # its stride may be any
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _copy(output: Tensor, value: Tensor) -> None:
    if output.requires_grad or value.requires_grad:  # autograd must not see it
        output, value = output.detach(), value.detach()
    output.copy_(value if value.shape == output.shape else value.view(output.shape))
