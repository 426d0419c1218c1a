"""Two threads that meet at each line of a lesson, so that nothing depends on who is faster.

While a thread walks through a method of the lesson, a second thread does something else at each of
its lines, and wherever a generator goes on within one; the first one waits for it. So a race goes
wrong at once, whether the machine is fast or slow. The second thread may have to wait for a lock
that the first one holds: then the first one goes on, and nothing more is begun until that is done.
"""

import linecache
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

PATIENCE_S = 20.0  # longest wait at a line, unless the second thread waits for a lock
LOOK_S = 0.01
NUM_LOOKS = 30  # looks at a thread without a movement, after which it waits for a lock
MOST = 200  # largest number of meetings


class Meetings:
    """Calls ``event`` in a thread at each line of ``file`` that another thread comes to."""

    def __init__(self, file: str, event: Callable[[], None]) -> None:
        self.file, self.event = file, event
        self.is_on = False
        self.lines: list[int] = []  # line of each meeting
        self.thread = threading.Thread()  # second thread

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
        """Watch the lines of threads that begin in here, while ``now()`` is entered."""
        threading.settrace(self._trace)
        try:
            yield
        finally:
            threading.settrace(None)  # type: ignore[arg-type]

    @contextmanager
    def now(self) -> Iterator[None]:
        """Let the threads meet, and wait for the second one in the end."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            if self.thread.ident is not None:
                self.thread.join(PATIENCE_S)

    def line(self, place: int) -> str:
        """Quote the line of the lesson at which the threads have met."""
        number = self.lines[place]
        return f"line {number}, {linecache.getline(self.file, number).strip()!r}"

    def _trace(self, frame: FrameType, kind: str, argument: object) -> Any:
        """Meet where a function begins or a generator continues, perhaps within a line."""
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
        """Wait until the second thread has ended, or seems to wait for this one."""
        until_s, places, num_looks = time.monotonic() + PATIENCE_S, [], 0
        while self.thread.is_alive() and num_looks < NUM_LOOKS and time.monotonic() < until_s:
            self.thread.join(LOOK_S)
            before, places = places, self._waiting()
            num_looks = num_looks + 1 if places and places == before else 0

    def _waiting(self) -> list[tuple[int, ...]]:
        """Return the places of other threads that are in the lesson, or in a lock of it."""
        places = []
        for thread, frame in sys._current_frames().items():
            is_inside = frame.f_code.co_filename in (self.file, threading.__file__)
            if is_inside and thread != threading.get_ident() and self._is_of_the_lesson(frame):
                places.append((thread, id(frame), frame.f_lasti))
        return places

    def _is_of_the_lesson(self, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        return frame is not None
