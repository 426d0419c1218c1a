"""Two threads that meet at each line of a lesson, so that nothing depends on speed.

While a thread walks through a method of the lesson, a second thread does something else at each of
its lines, and wherever a generator continues within one; the first one waits for it. So a race goes
wrong at once, whether the machine is fast or slow. The second thread may have to wait for a lock
that the first one holds: then the first one continues, and nothing more is begun until that is
done.
"""

import linecache
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

PATIENCE_S = 20.0  # longest wait for the last event
NUM_IDLE_LOOKS = 30  # looks at an idle process, after which its threads wait for a lock
MOST = 200  # largest number of meetings
NUM_LOOKS, LOOK_S = 500, 0.01


def threads_left(before: Collection[threading.Thread]) -> list[str]:
    """Wait for new threads to end; return the names of those that don't."""
    for _ in range(NUM_LOOKS):
        if not (left := {*threading.enumerate()} - {*before}):
            break
        time.sleep(LOOK_S)
    return sorted(f"the thread {thread.name}" for thread in left)


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
        num_looks = 0
        while self.thread.is_alive() and num_looks < NUM_IDLE_LOOKS:
            before_s = time.process_time()
            self.thread.join(LOOK_S)
            is_idle = time.process_time() - before_s < LOOK_S / 10
            num_looks = num_looks + 1 if is_idle else 0


# The contents of a file at any moment, also between two calls of one line


@contextmanager
def watched(path: Path) -> Iterator[list[bytes]]:
    """Look at a file before each bytecode of this thread; yield its contents, in order.

    The content is b"" while there is no file.
    """
    contents: list[bytes] = []

    def look() -> None:
        content = path.read_bytes() if path.exists() else b""
        if not contents or contents[-1] != content:
            contents.append(content)

    def trace(frame: FrameType, kind: str, argument: object) -> Any:
        frame.f_trace_opcodes = True
        look()
        return trace

    before = sys.gettrace()
    look()
    sys.settrace(trace)
    try:
        yield contents
    finally:
        sys.settrace(before)
    look()
