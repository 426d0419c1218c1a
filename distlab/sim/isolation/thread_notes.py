"""Fates of the threads of ranks, as far as they may explain why others wait.

Python only prints the error that ends a thread, keeps that of a future until it is asked for,
and says nothing of a daemon that ends with its process.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import _base as futures
from dataclasses import dataclass
from typing import Any

from distlab.sim.engine.scheduler import Strand
from distlab.sim.reporting.report import WHO, behind, error_line, place, told_once
from distlab.sim.reporting.sites import Places, Site

FAILURE = "_distlab_failure"  # attribute of a future whose task has failed
Replace = Callable[[Any, str, object], Any]  # (owner, name, value): what was there before


@dataclass
class Failure:
    """The error of a thread, or one that a future holds.

    Attributes:
        rank: Rank that owns the thread.
        text: Description of the error and its place.
        is_known: True once the program has asked for it.
    """

    rank: int
    text: str
    is_known: bool = False


class ThreadNotes:
    """Errors of ranks' threads and futures, and where daemons were when their rank ended."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._failures: list[Failure] = []
        self._abandoned: list[tuple[int, str]] = []

    def failed(self, rank: int, name: str, error: BaseException) -> None:
        """Keep the error that has ended a thread."""
        self._failures.append(
            Failure(rank, f"On {WHO}, thread {name!r} ended with {self._told(error)}.")
        )

    def future_failed(self, rank: int, name: str, error: BaseException) -> Failure:
        """Keep the error that a future holds, unless the program asks for it later."""
        by = f" in thread {name!r}" if name else ""
        told = (
            f"On {WHO}, what ran{by} ended with {self._told(error)}, and nobody has asked for it."
        )
        failure = Failure(rank, told)
        self._failures.append(failure)
        return failure

    def abandoned(self, rank: int, name: str, site: Site, start: Site) -> None:
        """Keep where a daemon was when its rank ended, or where it was started."""
        where = f", which was at {place(site)}"
        if not site[0]:
            where = f", which had not begun (started at {place(start)})"
        self._abandoned.append((rank, f"{WHO} ended, and daemon thread {name!r} with it{where}."))

    def failures(self) -> list[str]:
        """Say which errors the program does not know of."""
        return told_once((one.rank, one.text) for one in self._failures if not one.is_known)

    def of_daemons(self, ranks: Iterable[int]) -> list[str]:
        """Say where the daemons of ranks were when these ended."""
        blamed = {*ranks}
        told = told_once((rank, text) for rank, text in self._abandoned if rank in blamed)
        return [f"{text[:1].upper()}{text[1:]}" for text in told]

    def _told(self, error: BaseException) -> str:
        return f"{error_line(error)}{behind(self._places.raised_at(error))}"

    def watch_results(self, replace: Replace, running: Callable[[], Strand | None]) -> None:
        """Keep errors of futures until the program asks for them.

        Args:
            replace: Function that replaces an attribute and returns the original.
            running: Function that returns the calling strand, or None if no rank's thread calls.
        """

        def set_exception(future: Any, error: BaseException | None) -> None:
            if error is not None and (strand := running()):
                note = self.future_failed(strand.number, strand.name, error)
                setattr(future, FAILURE, note)
            fail(future, error)

        def result(future: Any, timeout: float | None = None) -> Any:
            try:
                return get(future, timeout)
            finally:
                self._ask(future)

        def exception(future: Any, timeout: float | None = None) -> Any:
            try:
                return get_error(future, timeout)
            finally:
                self._ask(future)

        fail = replace(futures.Future, "set_exception", set_exception)
        get = replace(futures.Future, "result", result)
        get_error = replace(futures.Future, "exception", exception)

    def _ask(self, future: Any) -> None:
        """Note that the program looks at what has failed: then it knows of the rank's others too.

        ``Executor.map`` asks for the first error only.
        """
        failure: Failure | None = getattr(future, FAILURE, None)
        for other in self._failures if failure else ():
            other.is_known = other.is_known or (failure is not None and other.rank == failure.rank)
