"""Grade the current task whenever a file of the course is saved.

    watcher thread ──"saved"──▶ ┌───────┐
                                │ queue │──▶ Watch.run: one event after the other
    key thread ────"n", "h"───▶ └───────┘

What comes while a grading runs: a save is graded once more afterwards, q leaves, other keys are
dropped, as they were meant for what was on the screen before.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue

from distlab.course import HINTS, CourseError, Task
from distlab.learner import compare, grading, hints, state, status
from distlab.learner.folder import CourseFolder, LearnerError

SAVED, QUIT = "saved", "q"
QUIET_MS, LONGEST_MS = 20, 200  # a save may be several writes: wait for silence, but not for long
LEAVE_MS = 200  # how often the watcher looks whether it should stop
Events = Queue[str]
Print = Callable[[Iterable[str]], None]


class Watch:
    """One session: the current task, and what each key does."""

    def __init__(
        self,
        folder: CourseFolder,
        task: Task,
        run: grading.Run,
        say: Print,
        clear: Print,
        options: Sequence[str] = (),
    ) -> None:
        """Prepare a session.

        Args:
            folder: the course's.
            task: to begin with.
            run: calls pytest.
            say: prints lines.
            clear: prints lines on an empty screen.
            options: of pytest, for every grading.
        """
        self.task = task
        self._options = options
        self._events: Events = Queue()
        self._urgent: list[str] = []  # came during a grading; the last one first
        self._folder, self._run, self._say, self._clear = folder, run, say, clear
        self._keys = {"n": self._next, "h": self._hint, "d": self._diff, "c": self._check_all}

    def run(self, events: Events) -> None:
        """Check the task, then do as told until told to quit."""
        self._events = events
        self.check()
        while (event := self._urgent.pop() if self._urgent else events.get()) != QUIT:
            if event == SAVED:
                self.check()
            elif event in self._keys:
                self._keys[event]()

    def check(self) -> bool:
        """Grade the current task and say what came out; whether it passed."""
        try:
            self._clear([f"grading {self.task.id} {self.task.function} …"])
            graded = self._grade(grading.for_task(self._folder, self.task))
        except (LearnerError, CourseError) as error:
            self._say([str(error)])
            return False
        grading.remember(self._folder, graded)
        self._clear(self._verdict(graded))
        return graded.code == grading.FULL_MARKS

    def _verdict(self, graded: grading.Grading) -> Iterator[str]:
        grade = graded.tasks.get(self.task.id)
        if grade:
            yield status.verdict(self.task, grade)
        if graded.code == grading.FULL_MARKS:
            yield from self._progress()
        else:
            yield from status.explanation(self._folder, self.task, graded)
        yield from ("", self._menu())

    def _progress(self) -> Iterator[str]:
        progress = state.load(self._folder)
        yield status.phase_line(self._folder.phase_of(self.task), progress)
        following = progress.next_task(self._folder, self.task)
        yield f"Next: {following.heading} (n)" if following else "All tasks have passed."

    def _menu(self) -> str:
        has_passed = state.load(self._folder).has_passed(self.task)
        keys = "n next  h hint  d diff" if has_passed else "h hint"
        return f"{keys}  c check all  q quit    (grades on every save)"

    # Keys

    def _next(self) -> None:
        progress = state.load(self._folder)
        following = progress.next_task(self._folder, self.task)
        if not progress.has_passed(self.task):
            self._say([f"{self.task.id} has not passed yet; h shows a hint"])
        elif following is None:
            self._say(status.whats_next(self._folder, progress))
        else:
            self.task = following
            self.check()

    def _hint(self) -> None:
        with self._refusals():
            taken = hints.take(self._folder, self.task, state.load(self._folder))
            rest = "" if taken.level < len(HINTS) else "That was the last hint."
            self._say(["", taken.title, "", taken.text, "", rest or "Once more h: the next hint"])

    def _diff(self) -> None:
        if not state.load(self._folder).has_passed(self.task):
            self._say([f"{self.task.id} has not passed yet: the solution comes afterwards"])
            return
        with self._refusals():
            found = compare.diff(self._folder, self.task)
            self._say(found.splitlines() or ["the same as the solution"])

    def _check_all(self) -> None:
        self._clear(["grading all tasks …"])
        with self._refusals():
            graded = self._grade(grading.suites(self._folder, self._folder.course.phases))
            progress = grading.remember(self._folder, graded)
            overview = status.overview(self._folder, progress)
            self._clear([*overview, *status.failure(graded), "", self._menu()])

    def _grade(self, arguments: list[str]) -> grading.Grading:
        """Grade, and sort what came meanwhile: before a verdict is shown, for keys answer that."""
        graded = grading.grade(self._folder, [*arguments, *self._options], self._run)
        waiting = set(_drained(self._events))
        self._urgent = [event for event in (SAVED, QUIT) if event in waiting]
        return graded

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (LearnerError, CourseError) as error:
            self._say([str(error)])


def _drained(events: Events) -> Iterator[str]:
    try:
        while True:
            yield events.get_nowait()
    except Empty:
        return


# Where events come from


@contextmanager
def saves_into(events: Events, folder: CourseFolder) -> Iterator[None]:
    """Put ``SAVED`` into the queue whenever a Python file of a phase changes."""
    folders = [folder.root / phase.folder for phase in folder.course.phases]
    stop = threading.Event()

    present = [path for path in folders if path.is_dir()]
    thread = threading.Thread(target=_follow_saves, args=(events, present, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=1)


def _follow_saves(events: Events, folders: Sequence[Path], stop: threading.Event) -> None:
    from watchfiles import PythonFilter, watch

    for _ in watch(
        *folders,
        watch_filter=PythonFilter(),
        step=QUIET_MS,
        debounce=LONGEST_MS,
        rust_timeout=LEAVE_MS,
        stop_event=stop,
    ):
        events.put(SAVED)


@contextmanager
def keys_into(events: Events) -> Iterator[None]:
    """Put every key of the terminal into the queue, without waiting for Enter."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    threading.Thread(target=_follow_keys, args=(events,), daemon=True).start()
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _follow_keys(events: Events) -> None:
    while key := sys.stdin.read(1):
        events.put(key.lower())
    events.put(QUIT)  # the terminal has gone
