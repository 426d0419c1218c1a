"""A rank's view of the others: how it waits for them, and how it leaves them.

MPI does not report that a rank has ended, so a rank says goodbye to the others before it ends.
Waiting inside MPI keeps a core busy, so a waiting rank polls MPI and sleeps briefly between polls,
while it listens for goodbyes.

MPI moves data only inside its calls: all operations progress whenever this rank waits for any of
them, and none while it computes.

MpiError
├── Mismatch  two ranks' calls of a collective, or a send and its recv, do not match
├── RankLeft  a rank that this one still waits for has ended
└── TimeIsUp  an operation took longer than its group allows
"""

import contextlib
import os
import re
import time
from collections import Counter, deque
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4py import MPI

if TYPE_CHECKING:
    from distlab.mpi.work import MpiWork

# With a core for each rank, an operation is usually done after this many tests; if it is not, a nap
# lets other ranks run.
TESTS_BEFORE_NAP = 100
NAP_S = 50e-6
LONG_NAP_S = 1e-3  # nap of a rank that has waited for a second
# Seconds for which a rank keeps polling for messages from a rank that has left.
GRACE_S = 1.0
MANY_UNFINISHED = 64

_GOODBYE, _RETURNED, _ROLL_CALL = 1, 2, 3  # tags of messages
_NOTHING = [bytearray(), MPI.BYTE]


class MpiError(RuntimeError):
    """An operation cannot be completed; the message names the ranks and the call."""


class Mismatch(MpiError):
    """Ranks disagree on an operation, such as on its kind, order, size, dtype or root."""


class RankLeft(MpiError):
    """A rank that others need has ended, through ``sys.exit`` or at the end of its program."""


class TimeIsUp(MpiError):
    """No rank has failed or left, but the operation took too long."""


class Runtime:
    """This process as one of the ranks that mpirun started; creating it is a collective call.

    Attributes:
        comm: Communicator of all ranks, from which groups are made.
        local_rank, local_size: Rank and number of ranks on this machine.
    """

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self._news = MPI.COMM_WORLD.Dup()
        on_this_machine = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = on_this_machine.rank, on_this_machine.size
        on_this_machine.Barrier()  # all must have opened the files before one removes them
        if self.local_rank == 0:
            _unlink_shared_memory()
        on_this_machine.Free()
        self._left: set[int] = set()
        self._returns: Counter[int] = Counter()  # rank -> number of functions that have returned
        self._num_runs = 0  # number of functions that have returned on all ranks
        self._unfinished: set[MpiWork] = set()
        self.queues: list[deque[MpiWork]] = []  # operations that await their turn, by group

    def keep(self, operation: "MpiWork") -> None:
        """Keep an operation alive until it is done, because MPI uses its memory.

        MPI continues even an operation that has failed here, so its memory is never released.
        """
        if len(self._unfinished) >= MANY_UNFINISHED:
            self._unfinished = {other for other in self._unfinished if not other.is_success()}
        self._unfinished.add(operation)

    def take_turns(self) -> None:
        """Let each group's collectives exchange data in call order, as MPI requires.

        A rank that computes for long without making calls delays the others.
        """
        for queue in self.queues:
            while queue and queue[0].take_turn():
                queue.popleft()

    def wait(self, operation: "MpiWork") -> None:
        """Block until an operation is done.

        Raises:
            MpiError: The operation can never be done.
        """
        for _ in range(TESTS_BEFORE_NAP):
            self.take_turns()
            if operation.is_completed():
                break
            os.sched_yield()
        else:
            self._wait_long(operation)
        if operation.is_success():
            self._unfinished.discard(operation)

    def _wait_long(self, operation: "MpiWork") -> None:
        start_s = noticed_s = time.monotonic()
        while not operation.is_completed():
            waited_s = time.monotonic() - start_s
            time.sleep(NAP_S if waited_s < 1 else LONG_NAP_S)
            self.take_turns()
            if self._hear_news():
                noticed_s = time.monotonic()
            is_grace = time.monotonic() - noticed_s < GRACE_S
            operation.give_up(set() if is_grace else self._gone(), waited_s)

    def _gone(self) -> set[int]:
        """Return the ranks that have ended, or returned from the function that still runs here."""
        returned = {rank for rank, count in self._returns.items() if count > self._num_runs}
        return self._left | returned

    def _hear_news(self) -> bool:
        """Note which ranks have returned or left; return True if any has."""
        is_news, status = False, MPI.Status()
        for tag in (_RETURNED, _GOODBYE):
            while self._news.Iprobe(MPI.ANY_SOURCE, tag, status):
                is_news, rank = True, status.Get_source()
                self._news.Recv(_NOTHING, rank, tag)
                if tag == _GOODBYE:
                    self._left.add(rank)
                else:
                    self._returns[rank] += 1
        return is_news

    def announce_return(self) -> None:
        """Tell the others that this rank's function has returned and will make no more calls."""
        self._tell_all(_RETURNED)

    def note_all_returned(self) -> None:
        """Note that all ranks have returned, so that none of them counts as gone any more."""
        self._num_runs += 1

    def _tell_all(self, tag: int) -> list[MPI.Request]:
        others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        return [self._news.Isend(_NOTHING, rank, tag) for rank in others]

    def call_the_roll(self, ranks: tuple[int, ...]) -> list[MPI.Request]:
        """Start reporting to the first of ``ranks``; on that rank, start receiving the reports."""
        first, *others = ranks
        if self.comm.rank == first:
            return [self._news.Irecv(_NOTHING, rank, _ROLL_CALL) for rank in others]
        return [self._news.Isend(_NOTHING, first, _ROLL_CALL)]

    def answer_the_roll(self, ranks: tuple[int, ...]) -> list[MPI.Request]:
        """Start receiving the reply of the first of ``ranks``; on that rank, start sending it."""
        first, *others = ranks
        if self.comm.rank == first:
            return [self._news.Isend(_NOTHING, rank, _ROLL_CALL) for rank in others]
        return [self._news.Irecv(_NOTHING, first, _ROLL_CALL)]

    def leave(self) -> None:
        """Say goodbye, and wait for all ranks to do so: ending MPI earlier would block others."""
        farewell = [*self._tell_all(_GOODBYE), self._news.Ibarrier()]
        while not MPI.Request.Testall(farewell):
            time.sleep(LONG_NAP_S)
            self.take_turns()
            self._hear_news()


def _unlink_shared_memory() -> None:
    """Remove the files of MPICH's shared memory, which lasts as long as processes map it.

    MPICH removes the files only when it ends normally; a killed job would leave megabytes behind.
    """
    with contextlib.suppress(OSError):  # only Linux has these files
        maps = Path("/proc/self/maps").read_text()
        for name in set(re.findall(r"/dev/shm/mpich_shm_\w+$", maps, re.MULTILINE)):
            os.unlink(name)


@cache
def runtime() -> Runtime:
    """Return this process's runtime; the first call is collective, so all ranks must make it."""
    return Runtime()
