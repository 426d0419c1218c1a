"""Two threads that meet at each line of a lesson, so that nothing depends on who is faster.

While a thread walks through a method of the lesson, something else is done at each of its lines,
and wherever a generator goes on within one, by a second thread, and is waited for. What can go
wrong there so goes wrong at once, be the machine fast or slow. The second thread may have to wait
for a lock that the first one holds: then the first one goes on, and nothing more is begun until
that is done.
"""

import linecache
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

PATIENCE_S = 20.0  # for what is done at a line, unless it waits for a lock
LOOK_S = 0.01
NUM_LOOKS = 30  # at a thread that has not moved since: then it waits for a lock
MOST = 200  # meetings, of a lesson that walks through very many lines


class Meetings:
    """Calls ``event`` in a thread at each line of ``file`` that another thread comes to."""

    def __init__(self, file: str, event: Callable[[], None]) -> None:
        self.file, self.event = file, event
        self.is_on = False
        self.lines: list[int] = []  # at which something was done
        self.thread = threading.Thread()  # that does it

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Watch the lines of the caller's thread."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            with self.now():
                yield
        finally:
            sys.settrace(before)

    @contextmanager
    def in_new_threads(self) -> Iterator[None]:
        """Watch the lines of threads that begin in here, whenever it is ``now()``."""
        threading.settrace(self._trace)
        try:
            yield
        finally:
            threading.settrace(None)  # type: ignore[arg-type]

    @contextmanager
    def now(self) -> Iterator[None]:
        """Let the threads meet, and wait in the end for what is still done."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            if self.thread.ident is not None:
                self.thread.join(PATIENCE_S)

    def told(self, index: int) -> str:
        """Say where the threads have met, in the words of the lesson."""
        number = self.lines[index]
        return f"line {number}, {linecache.getline(self.file, number).strip()!r}"

    def _trace(self, frame: FrameType, kind: str, argument: object) -> Any:
        """Meet where a function begins or a generator goes on, which need not begin a line."""
        if frame.f_code.co_filename != self.file:
            return None
        self._meet(frame)
        return self._at

    def _at(self, frame: FrameType, kind: str, argument: object) -> Any:
        if kind == "line":
            self._meet(frame)
        return self._at

    def _meet(self, frame: FrameType) -> None:
        if self.is_on and not self.thread.is_alive() and len(self.lines) < MOST:
            self.lines.append(frame.f_lineno)
            self.thread = threading.Thread(target=self._run, daemon=True)
            self.thread.start()
            self._wait()

    def _run(self) -> None:
        sys.settrace(None)
        self.event()

    def _wait(self) -> None:
        """Wait until it is done, or seems to wait for this thread."""
        until_s, places, num_looks = time.monotonic() + PATIENCE_S, [], 0
        while self.thread.is_alive() and num_looks < NUM_LOOKS and time.monotonic() < until_s:
            self.thread.join(LOOK_S)
            before, places = places, self._waiting()
            num_looks = num_looks + 1 if places and places == before else 0

    def _waiting(self) -> list[tuple[int, ...]]:
        """Where threads are that are in the lesson, and nowhere deeper than in a lock of it."""
        found = []
        for thread, frame in sys._current_frames().items():
            is_inside = frame.f_code.co_filename in (self.file, threading.__file__)
            if is_inside and thread != threading.get_ident() and self._is_of_the_lesson(frame):
                found.append((thread, id(frame), frame.f_lasti))
        return found

    def _is_of_the_lesson(self, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        return frame is not None
