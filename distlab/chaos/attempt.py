"""One start of the training, which is killed or comes to its end."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from distlab.chaos import victim
from distlab.chaos.processes import CONTEXT, CampaignError
from distlab.chaos.victim import Told, Training

END_S = 120.0  # a training that takes longer hangs


class Attempt:
    """The processes of a training, from their start to the end of the last one.

    with Attempt(training, scratch) as attempt:
        attempt.kill(rank, when)
    attempt.told
    """

    def __init__(self, training: Training, scratch: Path) -> None:
        """Start the processes.

        Args:
            scratch: a folder for files of this attempt alone.
        """
        self.told: list[Told] = []
        self.heard_s: list[float] = []  # since the start, for each of them
        self.started_s = time.monotonic()
        self.lasted_s = 0.0
        self.log = scratch / "errors.txt"
        self._listener, teller = CONTEXT.Pipe(duplex=False)
        self._ranks = [
            CONTEXT.Process(
                target=victim.train,
                args=(training, rank, scratch / "meeting", self.log, teller),
                daemon=True,
            )
            for rank in range(training.world_size)
        ]
        for process in self._ranks:
            process.start()
        teller.close()

    def __enter__(self) -> "Attempt":
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        """End all ranks, as torchrun does when one is gone."""
        for process in self._ranks:
            process.kill()
            process.join()
            process.close()
        self._listener.close()

    def kill_after(self, rank: int, seconds: float) -> bool:
        """Kill a rank that long after the start; return False if the training ended before."""
        return self._kill_when(rank, lambda: time.monotonic() - self.started_s >= seconds)

    def kill_in_save(self, rank: int, number: int, seconds: float) -> bool:
        """Kill a rank that long after the n-th save has begun; False: the training ended before."""

        def is_time() -> bool:
            return sum(told.what == "saving" for told in self.told) >= number

        if not self._wait(is_time):
            return False
        time.sleep(seconds)
        return self._kill(rank)

    def wait(self) -> bool:
        """Wait for the end of all ranks; return whether all have ended well."""
        self._wait(lambda: False)
        self.lasted_s = time.monotonic() - self.started_s
        for process in self._ranks:
            process.join(END_S)
        return all(process.exitcode == 0 for process in self._ranks)

    def _kill_when(self, rank: int, is_time: Callable[[], bool]) -> bool:
        return self._wait(is_time) and self._kill(rank)

    def _wait(self, is_time: Callable[[], bool]) -> bool:
        """Listen until it is time; return False if nobody is left to say anything."""
        heard_s = time.monotonic()
        while not is_time():
            if self._listener.poll(0.001):
                if not self._hear():
                    return False
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > END_S:
                raise CampaignError(f"the training says nothing for {END_S:g} s, see {self.log}")
        return True

    def _kill(self, rank: int) -> bool:
        """Send SIGKILL, and hear what had been said before."""
        process = self._ranks[rank]
        was_there = process.is_alive()
        process.kill()
        process.join()
        for other in self._ranks:  # rank 0 goes on saving until it is ended
            other.kill()
            other.join()
        while self._listener.poll(0) and self._hear():
            pass
        return was_there

    def _hear(self) -> bool:
        """Take what was said next; return False if nobody is left."""
        with suppress(EOFError, OSError):
            self.told.append(self._listener.recv())
            self.heard_s.append(time.monotonic() - self.started_s)
            return True
        return False
