"""The ``Work`` that an MPI operation returns."""

from collections import deque
from collections.abc import Generator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from distlab.mpi.runtime import Mismatch, MpiError, RankLeft, Runtime, TimeIsUp

Steps = Generator[list[MPI.Request], list[MPI.Status], None]
SAME_SIZE = "but a send and its recv need the same number of elements and the same dtype"


class MpiWork(dist.Work):
    """One operation in progress.

    Args:
        runtime: Runtime of this process.
        steps: Generator that posts and yields requests, and is sent their statuses in return.
        text: Description for errors, as in "all_reduce #3 (op SUM, size 4, dtype float32)".
        peers: Global ranks that the operation needs.
        timeout: Longest time to wait for the operation.
        tensors: Tensors that ``result`` and the future return.
        any_peer: True if one of ``peers`` is enough.
        queue: Queue of the group's collectives; only its head continues past the first ``yield``.
    """

    def __init__(
        self,
        runtime: Runtime,
        steps: Steps,
        text: str,
        peers: Sequence[int],
        timeout: timedelta,
        tensors: Sequence[Tensor] = (),
        *,
        any_peer: bool = False,
        queue: "deque[MpiWork] | None" = None,
    ) -> None:
        super().__init__()
        self._runtime, self._steps, self._text = runtime, steps, text
        self._peers, self._any_peer, self._timeout = set(peers), any_peer, timeout
        self._tensors = list(tensors)
        self._is_done = False
        self._error: Exception | None = None
        self.source = -1  # sender of a received message, as a rank inside the group
        self._statuses: list[MPI.Status] = []
        self._requests = next(steps)
        self._has_turn = queue is None
        if queue is not None:
            queue.append(self)
        runtime.keep(self)

    def is_completed(self) -> bool:
        """Let the operation progress; return True if it is done or has failed."""
        if not self._has_turn:
            self._runtime.take_turns()
        if self._has_turn and not self._is_done:
            self._advance()
        return self._is_done

    def take_turn(self) -> bool:
        """Let the head of the queue continue if the ranks have agreed; return True if they have."""
        self._advance()
        return self._has_turn

    def _advance(self) -> None:
        try:
            while MPI.Request.Testall(self._requests, self._statuses):
                self._has_turn, statuses, self._statuses = True, self._statuses, []
                self._requests = self._steps.send(statuses)
        except StopIteration:
            self._is_done = True
        except (MPI.Exception, MpiError) as error:
            self._has_turn = self._is_done = True
            self._error = self._located(error)

    def _located(self, error: Exception) -> MpiError:
        if isinstance(error, MpiError):
            return type(error)(f"{self._where()}: {error}")
        codes = [status.Get_error() for status in self._statuses]
        if MPI.ERR_TRUNCATE in map(MPI.Get_error_class, codes):
            return Mismatch(f"{self._where()}: got a longer message, {SAME_SIZE}")
        return MpiError(f"{self._where()}: {error}")

    def _where(self) -> str:
        comm = self._runtime.comm
        return f"rank {comm.rank} of {comm.size} in {self._text}"

    def give_up(self, gone: set[int], waited_s: float) -> None:
        """Raise RankLeft if a needed rank is gone, or TimeIsUp if the time limit has passed."""
        missing = self._peers & gone
        if missing and (missing == self._peers or not self._any_peer):
            raise RankLeft(
                f"{self._where()}: {_names(missing)} returned or ended without taking part: it "
                f"needs {_names(self._peers)}"
            )
        if waited_s > self._timeout.total_seconds():
            raise TimeIsUp(
                f"{self._where()}: not done after {self._timeout.total_seconds():g} s; it needs "
                f"{_names(self._peers)}, and at least one of them has not arrived"
            )

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is done.

        Raises:
            MpiError: Ranks disagree, one has left, or time is up.
        """
        if timeout:
            self._timeout = timeout
        self._runtime.wait(self)
        if self._error:
            raise self._error
        return True

    def is_success(self) -> bool:
        """Return True if the operation is done and did not fail."""
        return self.is_completed() and not self._error

    def synchronize(self) -> None:
        """Block until the operation is done; a CPU has no streams."""
        self.wait()

    block_current_stream = synchronize

    def result(self) -> list[Tensor]:
        """Return the tensors that were written."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the sender of a received message, as a rank inside the group."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Block until the operation is done, and return a completed future.

        The future cannot be completed later: code that waits for one, such as
        DistributedDataParallel's reducer, makes no MPI calls, and without calls MPI moves nothing.
        To overlap communication with the backward pass, use ``wait``, which needs no future.
        """
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


def _names(ranks: set[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
