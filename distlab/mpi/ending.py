"""End an mpirun job when a rank fails: one rank reports why, and all ranks end.

MPI does not notice when a rank fails while others wait for it. Ranks often fail together, from the
same error or ctrl-C; the first one to reach the shared store reports for all.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn

from mpi4py import MPI
from torch._C._distributed_c10d import Store

from distlab.util import processes
from distlab.util.tracebacks import is_message_enough

FAILED, INTERRUPTED = 1, 130
FORWARD_S = 0.3  # time for mpirun to forward output; it drops what is left when the job ends
STDERR = 2
PATIENCE_S = 10.0  # time that the reporting rank has to end the others
_CLAIM = "distlab/the rank that says why the job ends"


class Ending:
    """Ends the whole job if something stops this rank while the others may need it."""

    def __init__(self, store: Store, rank: int) -> None:
        """Remember the key-value store that all ranks share, and this rank's number."""
        self._store, self._rank = store, rank
        self._show = sys.excepthook  # torch's hook, which begins each line with the rank

    def watch(self) -> None:
        """From now on, end all ranks when an exception on this rank is not caught."""

        def end(
            kind: type[BaseException], error: BaseException, frames: TracebackType | None
        ) -> None:
            self._end_the_job(error.with_traceback(frames))

        sys.excepthook = end

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """Mark a block in which the others need this rank: an exception in it ends the job."""
        try:
            yield
        except BaseException as error:
            self._end_the_job(error)

    def _end_the_job(self, error: BaseException) -> NoReturn:
        """Report an error unless another rank did; end all ranks and mpirun with its exit code."""
        processes.ignore_ctrl_c()
        code = _exit_code(error)
        if not self._is_first():
            time.sleep(PATIENCE_S)
            os._exit(code)
        self._say(error)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(FORWARD_S)
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)  # hides the line that MPI would add
        MPI.COMM_WORLD.Abort(code)
        os._exit(code)  # Abort may return before mpirun's signal arrives

    def _is_first(self) -> bool:
        try:
            return int(self._store.compare_set(_CLAIM, "", str(self._rank))) == self._rank
        except RuntimeError:  # the rank that hosts the store was killed
            return True

    def _say(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
        elif isinstance(error, SystemExit):
            left = f"sys.exit({error.code!r}) before its function returned, so the job ends"
            print(f"[rank{self._rank}]: {left}", file=sys.stderr)
        elif is_message_enough(error):
            print(f"[rank{self._rank}]: {error}", file=sys.stderr)
        else:
            self._show(type(error), error, error.__traceback__)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    is_code = isinstance(error, SystemExit) and isinstance(error.code, int) and error.code
    return int(is_code) if is_code else FAILED
