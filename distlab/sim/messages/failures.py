"""Errors that belong to the world: calls of several ranks that cannot belong together.

One rank raises such an error, and may catch it. What it then does, and what the others do without
it, is another story: the first error is what has to be mended, whoever caught it.
"""

from collections.abc import Callable

from distlab.sim.reporting.errors import SimulationError

MAX_ERRORS = 1_000


class Failures:
    """Keeps the first error.

    Args:
        explain: makes of an error what is to be reported, while all ranks are where they were.
        stop: ends the world with an error.

    Attributes:
        first: to be reported, whatever else happens; None: there was none.
    """

    def __init__(
        self,
        explain: Callable[[SimulationError], SimulationError],
        stop: Callable[[BaseException], None],
    ) -> None:
        self._explain, self._stop = explain, stop
        self._num_errors = 0
        self.first: SimulationError | None = None

    def note(self, error: SimulationError) -> None:
        """Keep an error that is about to be raised in the running rank.

        Ranks that catch it and try again, for ever, are told to end.
        """
        self._num_errors += 1
        if self.first is None:
            self.first = self._explain(error)
        if self._num_errors > MAX_ERRORS:
            self._stop(self.first)
