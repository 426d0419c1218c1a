"""What has become of the threads of ranks, as far as it may explain why others wait.

Python only prints the error that ends a thread, keeps that of a task until somebody asks for its
result, and says nothing of a daemon that ends with its process.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import _base as futures
from dataclasses import dataclass
from typing import Any

from distlab.sim.engine.scheduler import Strand
from distlab.sim.reporting.report import error_line, place
from distlab.sim.reporting.sites import Places, Site

MAX_NOTES = 3
FAILURE = "_distlab_failure"  # attribute of a future whose task has failed
Replace = Callable[[Any, str, object], Any]  # (owner, name, value): what was there before


@dataclass
class Failure:
    """The error of a thread, or of a task that a thread has run.

    Attributes:
        text: says which and where.
        is_known: the program has asked for it.
    """

    text: str
    is_known: bool = False


class ThreadNotes:
    """By rank, errors of threads and tasks, and where daemons were when their rank ended."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._failures: defaultdict[int, list[Failure]] = defaultdict(list)
        self._abandoned: defaultdict[int, list[str]] = defaultdict(list)

    def failed(self, rank: int, name: str, error: BaseException) -> None:
        """Keep the error that has ended a thread."""
        self._failures[rank].append(
            Failure(f"Thread {name!r} of rank {rank} ended with {self._told(error)}.")
        )

    def task_failed(self, rank: int, name: str, error: BaseException) -> Failure:
        """Keep the error of a task, unless the program asks for it later."""
        by = f" in thread {name!r}" if name else ""
        failure = Failure(
            f"A task{by} of rank {rank} ended with {self._told(error)}, and nobody has asked for "
            "its result."
        )
        self._failures[rank].append(failure)
        return failure

    def abandoned(self, rank: int, name: str, site: Site) -> None:
        """Keep where a daemon was when its rank ended."""
        self._abandoned[rank].append(
            f"Rank {rank} ended while its daemon thread {name!r} was at {place(site)}: is a join() "
            "missing?"
        )

    def watch_results(self, replace: Replace, running: Callable[[], Strand | None]) -> None:
        """Keep errors of tasks until the program asks for them.

        Args:
            replace: puts a function in place of another.
            running: returns the thread of a rank that asks, if it is one.
        """

        def set_exception(future: Any, error: BaseException | None) -> None:
            if error is not None and (strand := running()):
                note = self.task_failed(strand.number, strand.name, error)
                setattr(future, FAILURE, note)
            fail(future, error)

        def result(future: Any, timeout: float | None = None) -> Any:
            try:
                return get(future, timeout)
            finally:
                _ask(future)

        def exception(future: Any, timeout: float | None = None) -> Any:
            try:
                return get_error(future, timeout)
            finally:
                _ask(future)

        fail = replace(futures.Future, "set_exception", set_exception)
        get = replace(futures.Future, "result", result)
        get_error = replace(futures.Future, "exception", exception)

    def failures(self) -> Iterator[str]:
        """Say which errors the program does not know of, the last few of each rank."""
        for rank in sorted(self._failures):
            unknown = [failure.text for failure in self._failures[rank] if not failure.is_known]
            yield from unknown[-MAX_NOTES:]

    def of_daemons(self, ranks: Iterable[int]) -> Iterator[str]:
        """Say where the daemons of ranks were when these ended."""
        for rank in ranks:
            yield from self._abandoned[rank][:MAX_NOTES]

    def _told(self, error: BaseException) -> str:
        return f"{error_line(error)}, {place(self._places.raised_at(error))}"


def _ask(future: Any) -> None:
    """Note that the program knows what has become of a task."""
    failure: Failure | None = getattr(future, FAILURE, None)
    if failure is not None:
        failure.is_known = True
