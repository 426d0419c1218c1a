"""Two threads that meet at each line of a lesson, so that results do not depend on speed.

While one thread runs a method of the lesson, a second thread runs an event at each line of the
method, and each time a generator resumes mid-line. The first thread waits for the event to finish,
so races show up every time, on fast and slow machines alike. If the event has to wait for a lock
that the first thread holds, the first thread continues, and no further event starts until this one
is done.
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
NUM_IDLE_LOOKS = 30  # idle looks in a row after which the thread counts as waiting for a lock
MOST = 200  # largest number of meetings
NUM_LOOKS, LOOK_S = 500, 0.01


def threads_left(before: Collection[threading.Thread]) -> list[str]:
    """Wait for new threads to end; return the names of those that do not."""
    for _ in range(NUM_LOOKS):
        if not (left := {*threading.enumerate()} - {*before}):
            break
        time.sleep(LOOK_S)
    return sorted(f"the thread {thread.name}" for thread in left)


class Meetings:
    """Calls ``event`` in a second thread at each line of ``file`` that a watched thread reaches."""

    def __init__(self, file: str, event: Callable[[], None]) -> None:
        self.file, self.event = file, event
        self.is_on = False
        self.lines: list[int] = []  # line of each meeting
        self.thread = threading.Thread()  # the second thread

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
        """Watch the lines of threads that start inside this context, while ``now()`` is active."""
        threading.settrace(self._trace)
        try:
            yield
        finally:
            threading.settrace(None)  # type: ignore[arg-type]

    @contextmanager
    def now(self) -> Iterator[None]:
        """Let the threads meet inside this context, and wait for the second one at its end."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            if self.thread.ident is not None:
                self.thread.join(PATIENCE_S)

    def line(self, place: int) -> str:
        """Return the number and the text of the line of the lesson at a meeting."""
        number = self.lines[place]
        return f"line {number}, {linecache.getline(self.file, number).strip()!r}"

    def _trace(self, frame: FrameType, kind: str, argument: object) -> Any:
        """Meet where a function starts or a generator resumes, perhaps mid-line."""
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


# Contents of a file at every moment, even between two calls on one line


@contextmanager
def watched(path: Path) -> Iterator[list[bytes]]:
    """Look at a file before each bytecode instruction of this thread; yield a list of its contents.

    The content is added to the list whenever it has changed. While the file does not exist, its
    content is b"".
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
