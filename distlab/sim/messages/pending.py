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
    """One rank's side of an operation in flight.

    Attributes:
        rank: Global rank that posted the operation.
        name: Name of the call, such as "send", "recv" or "all_reduce".
        group: Global ranks of the group.
        num_bytes: Bytes of this rank's tensors.
        posted_s: Virtual time of the call.
        done_s: Virtual time at which the operation ended; valid only once ``is_done``.
        error: Error with which the operation failed, or None.
        site: File, line and function of the call.
        is_by_torch: True if code inside torch made the call and keeps the handle to itself.
        maker: Torch function that made the call; "" if the program made it.
        behind: Operations that have to be done before this one begins.
    """

    __slots__ = (
        *("behind", "done_s", "group", "is_by_torch", "is_done", "name", "num_bytes"),
        *("actions", "clock", "error", "maker", "posted_s", "rank", "site", "waiters"),
    )
    kind = "collective"  # or "send", "recv", "founding", "store", "thread"
    is_recorded = True  # False if the trace records waits for it, but not the operation
    peer = -1  # global rank of a message's other side
    number = -1  # number that both sides of a message share

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
        self.behind: tuple[Pending, ...] = ()
        self.actions: tuple[Callable[[], None], ...] = ()
        self.error: Exception | None = None

    def finish(self, at_s: float) -> None:
        """Mark the operation done, record it, and wake the strands that wait for it."""
        self.is_done = True
        self.done_s = at_s
        if self.is_recorded:
            of_rank = self.rank, self.kind, self.name, self.posted_s, at_s, self.num_bytes
            self.clock.trace.record((*of_rank, self.peer, self.site, self.number))
        for waiter in self.waiters:
            self.clock.ready(waiter, at_s)
        if self.actions:
            self._act()

    def then(self, action: Callable[[], None]) -> None:
        """Call ``action`` once the operation is done."""
        self.actions = (*self.actions, action)

    def first(self) -> "Pending":
        """Return the operation that has to be done first: those of a stream take turns."""
        operation = self
        while waiting := [other for other in operation.behind if not other.is_done]:
            operation = waiting[0]
        return operation

    def _act(self) -> None:
        actions, self.actions, self.behind = self.actions, (), ()
        for action in actions:
            action()

    def fail(self, error: Exception, at_s: float) -> None:
        """Mark the operation failed, so that current and future waits raise an error."""
        self.error, self.is_done, self.done_s = error, True, at_s
        for waiter in self.waiters:
            self.clock.ready(waiter, at_s)
        if self.actions:
            self._act()

    def abandon(self, at_s: float) -> None:
        """End the operation though it has moved no bytes."""
        self.is_done, self.done_s = True, at_s
        if self.actions:
            self._act()

    def let_go(self) -> None:
        """Drop the tensors, for nothing will be done with them any more."""

    def wait(self, limit_s: float = NEVER, group_limit_s: float = NEVER) -> None:
        """Block the running rank until the operation is done, and move its clock to that time.

        Args:
            limit_s: Longest time that the rank waits.
            group_limit_s: Longest time that the operation may take.

        Raises:
            Exception: the operation failed, or was not done in time.
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
        """Let other strands run until the operation is done, or until ``until_s``.

        If the running rank has to wait, its clock moves to the time at which the rank continues.

        Returns:
            True if the operation was done in time.
        """
        if self.is_done:
            return True
        me = self.clock.scheduler.current
        self.waiters = (*self.waiters, me)
        try:
            return self.clock.block(self, until_s)
        finally:
            if not self.is_done:  # once it is done, it wakes no more strands
                self.waiters = tuple(other for other in self.waiters if other is not me)

    def late(self, limit_s: float) -> Exception:
        """Return the error for a rank whose own limit has expired."""
        return self.expired(limit_s)

    def expired(self, limit_s: float) -> Exception:
        """Return the error for an operation that took too long; subclasses also end it."""
        return limits.operation_error(
            self.rank, self.name, limit_s, f"{self.text()}, {self.where()}"
        )

    def check_unchanged(self, tensor: Tensor, before: Tensor) -> None:
        """Check that a tensor was not modified while the operation was under way.

        Raises:
            Mismatch: the tensor differs from ``before``.
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
        """Return the global ranks that have yet to do their part."""
        raise NotImplementedError

    def title(self) -> str:
        """Return the call's name for use in a sentence, such as ``recv``."""
        return self.full_name()

    def full_name(self) -> str:
        """Return the call's name, such as ``broadcast``.

        For a call that torch made, it is a name like ``broadcast_object_list's broadcast``.
        """
        return f"{self.maker}'s {self.name}" if self.maker else self.name

    def brief(self) -> str:
        """Return a short text for a picture, such as ``recv from rank 2`` or ``all_reduce``."""
        return self.name

    def text(self) -> str:
        """Return the text for a report, such as ``recv from rank 2, (4,) float32``."""
        raise NotImplementedError

    def where(self) -> str:
        """Return where the call was made, such as ``ring.py:41 in exchange``."""
        return place(self.site)

    def row(self) -> Row:
        """Return the operation's row in a report."""
        return Row((self.rank,), self.text(), self.where())


Quiet = Callable[[], contextlib.AbstractContextManager[object]]
_NOTHING = contextlib.nullcontext()


class Buffers:
    """Copies ranks' tensors for the simulator, at no cost to the ranks.

    Args:
        is_strict: True to check that buffers of operations in flight do not change.
        unnoticed: Function that returns a context in which operations cost the running rank
            nothing; None if no operation costs anything.

    Attributes:
        unnoticed: The same function; if None was given, one whose context does nothing.
        copy: Function that copies its second argument into its first.
    """

    def __init__(self, *, is_strict: bool, unnoticed: Quiet | None) -> None:
        self.is_strict = is_strict
        self.unnoticed: Quiet = unnoticed or (lambda: _NOTHING)
        self.copy = _copy if unnoticed is None else self._copy_unnoticed

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor as it is now."""
        with self.unnoticed():
            return tensor.detach().clone()

    def _copy_unnoticed(self, output: Tensor, value: Tensor) -> None:
        with self.unnoticed():
            _copy(output, value)


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit; unlike with ``==``, NaN equals itself."""
    return torch.equal(_bytes(x), _bytes(y))


def _bytes(x: Tensor) -> Tensor:
    flat = x.detach().contiguous().view(-1)  # 1-D, as a 0-d tensor cannot be viewed as bytes
    if flat.numel() == 1:  # a single element may have any stride, but a view needs 1
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _copy(output: Tensor, value: Tensor) -> None:
    if output.requires_grad or value.requires_grad:  # autograd must not see the copy
        output, value = output.detach(), value.detach()
    output.copy_(value if value.shape == output.shape else value.view(output.shape))
