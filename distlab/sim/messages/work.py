"""The ``Work`` that a simulated operation returns."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from distlab.sim.engine.scheduler import NEVER
from distlab.sim.messages.limits import limit_s
from distlab.sim.messages.pending import Pending
from distlab.sim.reporting.report import Row
from distlab.util.text import joined, rank_names

MAX_NOTES = 2


class Handles:
    """The operations whose ``wait()`` has not been called yet.

    Attributes:
        open: These operations, as keys, in the order of their calls.
        twice: Messages for which a rank has waited twice.
    """

    def __init__(self) -> None:
        self.open: dict[Pending, None] = {}  # a plain dict, for speed: every operation is added
        self.twice: dict[Row, None] = {}
        self._earlier: Collection[Pending] = ()  # operations of earlier runs

    def begin_run(self) -> None:
        """Note that the operations so far are of earlier runs."""
        self._earlier = {*self.open}

    def rows(self, ranks: Iterable[int]) -> list[Row]:
        """Return rows for the open handles of these ranks, sorted by rank; equal ones share a row.

        Handles that torch keeps to itself, as in DistributedDataParallel, are left out.
        """
        return _rows(self.open, ranks)

    def _noted(self, ranks: Iterable[int]) -> list[Row]:
        """Return the first few rows, without operations of earlier runs that are done."""
        noted = [p for p in self.open if not (p.is_done and p in self._earlier)]
        return _rows(noted, ranks)[:MAX_NOTES]

    def note_of_failed(self, rank: int) -> str:
        """Return a note on operations that a failed rank had not waited for; "" if none."""
        texts = [f"{row.text} ({row.where})" for row in self._noted([rank])]
        return f"Rank {rank} had not waited for its {joined(texts)}." if texts else ""

    def notes(self, returned: Iterable[int]) -> Iterator[str]:
        """Yield notes on the first few operations that ranks returned without waiting for."""
        for row in self._noted(returned):
            who = rank_names(row.ranks).capitalize()
            yield f"{who} returned without waiting for its {row.text} ({row.where})."


def _rows(operations: Iterable[Pending], ranks: Iterable[int]) -> list[Row]:
    wanted = set(ranks)
    unwaited = (p for p in operations if p.rank in wanted and not p.is_by_torch)
    counts = Counter(row_of(pending) for pending in unwaited)
    rows = [_counted(row, count) for row, count in counts.items()]
    return sorted(rows, key=lambda row: row.ranks)


def row_of(pending: Pending) -> Row:
    """Return a row for a report, which calls a send ``isend`` and a recv ``irecv``."""
    letter = "i" if pending.kind in ("send", "recv") else ""
    return Row((pending.rank,), f"{letter}{pending.text()}", pending.where())


def _counted(row: Row, count: int) -> Row:
    return row if count == 1 else row._replace(text=f"{row.text} ({count} times)")


class SimWork(dist.Work):
    """Handle of an operation that takes virtual time.

    ``work_of`` makes it and sets its attributes, because an ``__init__`` would be slower.
    """

    __slots__ = ("_handles", "_limit_s", "_was_waited", "pending", "tensors")

    _handles: Handles
    _limit_s: float
    _was_waited: bool
    pending: Pending
    tensors: Sequence[Tensor]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is done; raise if it takes too long in virtual time.

        Even without a time limit, an operation that can never be done does not block forever: it is
        reported as a deadlock.
        """
        self._handles.open.pop(self.pending, None)
        if self._was_waited and self.pending.kind in ("send", "recv"):
            self._handles.twice[row_of(self.pending)] = None
        self._was_waited = True
        self.pending.wait(NEVER if timeout is None else limit_s(timeout), self._limit_s)
        return True

    def is_completed(self) -> bool:
        """Return whether the operation is done at this rank's time.

        Each call takes a microsecond of virtual time.
        """
        clock = self.pending.clock
        clock.poll(lambda: self.pending)
        is_completed = self.pending.is_done and self.pending.done_s <= clock.current.clock_s
        if is_completed:
            self._handles.open.pop(self.pending, None)
        return is_completed

    def is_success(self) -> bool:
        """Return whether the operation is done; a failed one raises an error in its rank."""
        return self.is_completed()

    # A simulated rank has a single stream, so all three methods do the same.
    synchronize = block_current_stream = wait  # type: ignore[assignment]

    def result(self) -> list[Tensor]:
        """Return the tensors that were written."""
        return list(self.tensors)

    def source_rank(self) -> int:
        """Return the rank, numbered inside the group, that sent the received message."""
        return int(getattr(self.pending, "source", -1))

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Block until the data has arrived, then return a completed future.

        C++ code, such as the reducer of DistributedDataParallel, waits for futures without letting
        other ranks run. So this method does the waiting. During a backward pass, it leaves the
        rank's clock where it is; the clock moves to the end of the operation only when the backward
        pass ends, which is where the reducer waits. As a result, asynchronous operations that ranks
        post in different orders deadlock here; NCCL forbids them too.
        """
        self._handles.open.pop(self.pending, None)
        rank = self.pending.clock.current
        if torch._C._current_graph_task_id() == -1:  # not in a backward pass
            self.pending.wait()
        else:
            posted_s = rank.clock_s
            self.pending.block()
            rank.clock_s = posted_s
            Variable._execution_engine.queue_callback(self.pending.wait)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(list(self.tensors))
        return future


Handle = TypeVar("Handle", bound=SimWork)


def work_of(
    pending: Pending,
    tensors: Sequence[Tensor],
    handles: Handles,
    group_limit_s: float,
    kind: type[Handle] = SimWork,  # type: ignore[assignment]
) -> Handle:
    """Return the handle of an operation that the running rank has posted.

    Args:
        pending: Operation to wait for.
        tensors: Value of the handle's future.
        handles: Collection that holds the operation until it is waited for.
        group_limit_s: Time limit of the group.
        kind: Class of the handle.
    """
    work = kind()
    work._limit_s, work._handles, work._was_waited = group_limit_s, handles, False
    work.pending, work.tensors = pending, tensors
    handles.open[pending] = None
    rank = pending.clock.scheduler.current.rank
    rank.num_calls += 1
    rank.last_call = pending
    return work
