"""Limits on busy-waiting: one rule for polls, sleeps and readings of the clock.

A rank that polls never blocks, so if all ranks of a deadlocked program poll, none appears to wait.
Hence this rule: a strand that has done nothing but poll or sleep for a long time counts as waiting
for the operation that it polls. If all other strands wait as well, and no event is pending, the
polling can never succeed, and the world is deadlocked.

    work      poll, poll, poll, …         MAX_POLLS times, however long that takes
    work      sleep, sleep, …             more than MIN_RESTS, and longer than PATIENCE_S in total
    work      time.time(), time.time()    after FREE_READINGS, each takes virtual time
"""

from collections.abc import Callable

MAX_POLLS = 10_000  # limit on polls in a row; programs that give up or sleep at times make fewer
MIN_RESTS = 100  # up to this many sleeps in a row never count as waiting
PATIENCE_S = 1800.0  # limit on seconds slept in a row; gloo waits just as long for a missing rank
STRETCH = 0.1  # each sleep after MAX_POLLS is longer by this fraction of the time slept so far
POLL_S = 1e-6  # cost of is_completed(); if it were free, a polling loop would never end
# A program that times its steps reads the clock only a few times between communication calls. One
# that reads it more often is polling. torch itself never reads the clock during a step.
FREE_READINGS = 100

Operation = Callable[[], object]  # returns an operation to name in reports


class Patience:
    """The polls and sleeps of a strand since it last worked.

    Attributes:
        asks: Function that returns the operation that the strand counts as waiting for, or None.
        tried: Function that returns the operation whose wait has timed out, or None.
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
        """Note that the strand blocks without a time limit."""
        self._num_asked, self.asks, self.tried = 0, None, None

    def wakes(self, now_s: float) -> None:
        """Note that the strand continues after blocking."""
        self._worked_s = now_s

    def polls(self, operation: Operation, max_polls: int) -> bool:
        """Note a poll; return whether it is time to check if all strands poll in vain."""
        self.asks = operation
        self._num_asked += 1
        return self._num_asked % max_polls == 0

    def rests(self, operation: Operation | None, describe: Operation, now_s: float) -> bool:
        """Note a sleep; return whether the strand has slept so often that it counts as waiting.

        Args:
            operation: Function that returns the operation whose wait has just timed out, or None.
            describe: Function that returns the operation to report if the strand only sleeps.
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

        Half an hour of 1 ms sleeps is two million sleeps; stretching reduces that to thousands.
        """
        return STRETCH * (now_s - self._worked_s)

    def acts(self, now_s: float, *, is_progress: bool) -> None:
        """Note a communication call, after which the clock may be read for free again.

        Args:
            now_s: Virtual time of the call.
            is_progress: False for a call that counts as polling.
        """
        self._num_readings = 0
        if is_progress:  # a copy of `works`, since this runs for every message
            self._worked_s, self._num_asked = now_s, 0
            self.asks = self.tried = None

    def reading_s(self) -> float:
        """Note a reading of the clock; return its cost.

        The first hundred are free; after that, the cost doubles every hundred readings.
        """
        self._num_readings += 1
        if self._num_readings <= FREE_READINGS:
            return 0.0
        return POLL_S * float(2 ** min(self._num_readings // FREE_READINGS - 1, 10))
