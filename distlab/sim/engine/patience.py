"""Limits on waiting by asking: one rule for polls, sleeps and readings of the clock.

A program that asks "is it done?" again and again never blocks, so in a deadlock of such programs no
rank is known to wait. The rule: a strand that has done nothing but ask or sleep since its last
work, for long enough, counts as waiting for what it asks about. If all others wait as well, and no
event is pending, asking can never help, and the world is deadlocked.

    work      poll, poll, poll, …         MAX_POLLS times, however long that takes
    work      sleep, sleep, …             more than MIN_RESTS, and longer than PATIENCE_S in all
    work      time.time(), time.time()    from FREE_READINGS on, each takes time: it must pass
"""

from collections.abc import Callable

MAX_POLLS = 10_000  # polls in a row; a program that gives up or sleeps makes fewer
MIN_RESTS = 100  # least number of sleeps that counts as a loop
PATIENCE_S = 1800.0  # seconds of sleeping; gloo waits as long for a rank that does not come
STRETCH = 0.1  # share of the time slept so far that is added to a sleep after MAX_POLLS
POLL_S = 1e-6  # cost of is_completed(); if it were free, a polling loop would never end
# A program that times its steps reads the clock a few times between two communication calls. One
# that reads it more often is polling. torch never reads it during a step.
FREE_READINGS = 100

Operation = Callable[[], object]  # makes the operation for a report


class Patience:
    """The questions that a strand has asked since it last worked.

    Attributes:
        asks: Maker of the operation that it counts as waiting for, or None if it does not wait.
        tried: Maker of the operation whose wait has timed out, or None.
    """

    __slots__ = ("_num_asked", "_num_readings", "_worked_s", "asks", "tried")

    def __init__(self, now_s: float) -> None:
        self._num_readings = 0
        self.works(now_s)

    def works(self, now_s: float) -> None:
        """Note that the strand has computed or communicated."""
        self._worked_s, self._num_asked = now_s, 0
        self.asks = self.tried = None

    asks: Operation | None
    tried: Operation | None

    def waits(self) -> None:
        """Note that the strand blocks, with a time limit."""
        self.asks = None

    def blocks(self) -> None:
        """Note that the strand blocks, until it is woken."""
        self._num_asked, self.asks, self.tried = 0, None, None

    def wakes(self, now_s: float) -> None:
        """Note that a strand that has blocked continues."""
        self._worked_s = now_s

    def polls(self, operation: Operation, max_polls: int) -> bool:
        """Note a question; return whether it is time to see if all strands ask in vain."""
        self.asks = operation
        self._num_asked += 1
        return self._num_asked % max_polls == 0

    def rests(self, operation: Operation | None, describe: Operation, now_s: float) -> bool:
        """Note a sleep; return whether the strand has slept so often that it counts as waiting.

        Args:
            operation: Maker of the operation that it has waited for meanwhile, or None.
            describe: Maker of an operation for a strand that only sleeps.
            now_s: Virtual time after the sleep.
        """
        self._num_asked += 1
        self.tried = operation or self.tried
        is_long = self._num_asked > MIN_RESTS and self.is_over(now_s)
        if self._num_asked <= MAX_POLLS and not is_long:
            return False
        self.asks = self.tried or self.asks or describe
        return True

    def is_over(self, now_s: float) -> bool:
        """Return whether the strand has slept for longer than PATIENCE_S."""
        return now_s - self._worked_s > PATIENCE_S

    def stretch_s(self, now_s: float) -> float:
        """Return the seconds to add to a sleep if nothing can happen meanwhile.

        Half an hour in milliseconds is two million sleeps; this way it takes thousands.
        """
        return STRETCH * (now_s - self._worked_s)

    def acts(self, now_s: float, *, is_progress: bool) -> None:
        """Note a communication call, after which the clock may be read for free again.

        Args:
            now_s: Virtual time of the call.
            is_progress: False for a call that counts as asking.
        """
        self._num_readings = 0
        if is_progress:  # inlines `works`, because every message comes here
            self._worked_s, self._num_asked = now_s, 0
            self.asks = self.tried = None

    def reading_s(self) -> float:
        """Note a reading of the clock; return its cost.

        In every hundred readings, each costs twice as much as in the hundred before.
        """
        self._num_readings += 1
        if self._num_readings <= FREE_READINGS:
            return 0.0
        return POLL_S * float(2 ** min(self._num_readings // FREE_READINGS - 1, 10))
