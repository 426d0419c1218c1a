"""Notes on how ranks' threads ended, which may explain why others wait.

Python only prints the error that ends a thread, keeps a future's error until the program asks for
it, and says nothing about a daemon thread that ends with its process.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import _base as futures
from typing import Any

from distlab.sim.engine.scheduler import Strand
from distlab.sim.reporting.report import WHO, error_line, merged_notes, place, place_suffix
from distlab.sim.reporting.sites import Places, Site
from distlab.util.replacing import Replace

FAILED_ON = "_distlab_failed_on"  # attribute of a failed future that holds its task's rank


class ThreadNotes:
    """Errors of ranks' threads and futures, and where daemons were when their rank ended."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._failures: list[tuple[int, str]] = []  # (rank, note on an error)
        self._abandoned: list[tuple[int, str]] = []

    def begin_run(self) -> None:
        """Forget the threads that ended in earlier runs."""
        self._failures.clear()
        self._abandoned.clear()

    def failed(self, rank: int, name: str, error: BaseException) -> None:
        """Record an error that has ended a thread."""
        text = f"On {WHO}, thread {name!r} ended with {self._describe(error)}."
        self._failures.append((rank, text))

    def future_failed(self, rank: int, name: str, error: BaseException) -> None:
        """Record a future's error, which is reported unless the program asks for it."""
        by = f" in thread {name!r}" if name else ""
        ending = f"ended with {self._describe(error)}"
        text = f"On {WHO}, what ran{by} {ending}, and nobody has asked for it."
        self._failures.append((rank, text))

    def abandoned(self, rank: int, name: str, site: Site, start: Site) -> None:
        """Record where a daemon was when its rank ended.

        For a daemon that never ran, record where it was started.
        """
        where = f", which was at {place(site)}"
        if not site[0]:
            where = f", which had not begun (started at {place(start)})"
        self._abandoned.append((rank, f"{WHO} ended, and daemon thread {name!r} with it{where}."))

    def failures(self) -> list[str]:
        """Return notes on the errors that the program has not asked for."""
        return merged_notes(self._failures)

    def of_daemons(self, ranks: Iterable[int]) -> list[str]:
        """Return notes on where the ranks' daemons were when the ranks ended."""
        blamed = {*ranks}
        notes = merged_notes((rank, text) for rank, text in self._abandoned if rank in blamed)
        return [f"{text[:1].upper()}{text[1:]}" for text in notes]

    def _describe(self, error: BaseException) -> str:
        return f"{error_line(error)}{place_suffix(self._places.raised_at(error))}"

    def watch_results(self, replace: Replace, running: Callable[[], Strand | None]) -> None:
        """Record the errors of futures, and forget them once the program asks for one.

        Args:
            replace: Function that replaces an attribute and returns the original.
            running: Function that returns the calling strand, or None outside ranks' threads.
        """

        def set_exception(future: Any, error: BaseException | None) -> None:
            if error is not None and (strand := running()):
                self.future_failed(strand.number, strand.name, error)
                setattr(future, FAILED_ON, strand.number)
            fail(future, error)

        def asking(get: Callable[..., Any]) -> Callable[..., Any]:
            def ask(future: Any, timeout: float | None = None) -> Any:
                try:
                    return get(future, timeout)
                finally:
                    self._ask(future)

            return ask

        fail = replace(futures.Future, "set_exception", set_exception)
        replace(futures.Future, "result", asking(futures.Future.result))
        replace(futures.Future, "exception", asking(futures.Future.exception))

    def _ask(self, future: Any) -> None:
        """Forget a rank's failures when its program asks for the result of a failed future.

        All of them are forgotten, because ``Executor.map`` never asks for the errors after the
        first.
        """
        rank = getattr(future, FAILED_ON, None)
        self._failures = [failure for failure in self._failures if failure[0] != rank]
