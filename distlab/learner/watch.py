"""Grade the current task whenever a file of the course is saved.

    watcher thread ──"saved"──▶ ┌───────┐
                                │ queue │──▶ Watch.run: one event at a time
    key thread ────"n", "h"───▶ └───────┘

During a grading run, q quits immediately, and any number of saves start one more run afterwards.
Other keys are queued, each at most once, and handled after the verdict.
"""

import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue

from distlab.course import HINTS, CourseError, Task
from distlab.learner import compare, grading, hints, state, status
from distlab.learner.folder import CourseFolder, LearnerError

SAVED, QUIT = "saved", "q"
QUIET_MS, LONGEST_MS = 20, 200  # saving may take several writes: wait for a pause, but not long
LOOK_UP_S = 0.5
LEAVE_MS = 200  # interval at which the watcher checks whether to stop
Events = Queue[str]


# The screen: lines are wrapped between words, and the verdict stays visible

CUT = "… (all of it again: save)"
LIST = ("- ", "* ", "|", "    ", "```")  # beginnings of lines that must not be joined


class Screen:
    """A terminal that wraps lines to its width."""

    def __init__(
        self,
        say: Callable[[Iterable[str]], None],
        clear: Callable[[], None],
        size: Callable[[], tuple[int, int]] = shutil.get_terminal_size,
    ) -> None:
        self._say, self._clear, self._size = say, clear, size

    def show(self, lines: Iterable[str]) -> None:
        """Clear the screen and print lines."""
        self._clear()
        self.add(lines)

    def add(self, lines: Iterable[str]) -> None:
        """Print lines below those already shown."""
        self._say(wrapped(lines, self._size()[0]))

    def show_below(self, verdict: Iterable[str], answer: Iterable[str]) -> None:
        """Print an answer below as much of a verdict as fits."""
        self._clear()
        self._say(fitted(verdict, answer, *self._size()))


def wrapped(lines: Iterable[str], width: int) -> list[str]:
    """Break lines between words; indent the continuations of indented lines two columns more."""
    return [part for line in lines for part in _wrapped(line, width)]


def _wrapped(line: str, width: int) -> Sequence[str]:
    if len(line) <= width:
        return (line,)
    indent = line[: len(line) - len(line.lstrip())]
    indent += "  " if indent else ""
    return textwrap.wrap(
        line, width, subsequent_indent=indent, replace_whitespace=False, break_on_hyphens=False
    )


def fitted(verdict: Iterable[str], answer: Iterable[str], width: int, height: int) -> list[str]:
    """Wrap a verdict and an answer; cut the verdict if both together do not fit on the screen."""
    top, below = wrapped(verdict, width), wrapped(answer, width)
    room = height - 1 - len(below)  # the last line is for the cursor
    return [*(top if len(top) <= room else [*top[: max(room - 1, 1)], CUT]), *below]


def paragraphs(text: str) -> Iterator[str]:
    """Yield each paragraph of a text as one line, to be wrapped anew; lists keep their lines."""
    for place, paragraph in enumerate(text.split("\n\n")):
        lines = paragraph.splitlines()
        yield from [""] * bool(place)
        is_plain = not any(line.startswith(LIST) for line in lines)
        yield from [" ".join(lines)] if is_plain else lines


# The session


class Watch:
    """One session: the current task, and what each key does."""

    def __init__(
        self,
        folder: CourseFolder,
        task: Task,
        run: grading.RunPytest,
        screen: Screen,
        options: Sequence[str] = (),
    ) -> None:
        """Prepare a session.

        Args:
            folder: The course's folder.
            task: First task.
            run: Function that runs pytest.
            screen: Terminal.
            options: Arguments for every run of pytest.
        """
        self.task = task
        self._options = options
        self._events: Events = Queue()
        self._pending: list[str] = []  # events that arrived during a grading run, next one first
        self._verdict: list[str] = []  # lines of the last verdict
        self._folder, self._run, self._screen = folder, run, screen
        self._keys = {"n": self._next, "h": self._hint, "d": self._diff, "c": self._check_all}

    def run(self, events: Events) -> None:
        """Grade the task, then handle events until ``QUIT`` arrives."""
        self._events = events
        self.check()
        while (event := self._pending.pop(0) if self._pending else _next(events)) != QUIT:
            if event == SAVED:
                self.check()
            elif event in self._keys:
                self._keys[event]()

    def check(self) -> None:
        """Grade the current task and show the outcome."""
        self._screen.show([f"grading {self.task.id} {self.task.label} …"])
        with self._refusals():
            graded = self._grade(self.task)
            if QUIT in self._pending:
                return
            progress = grading.remember(self._folder, graded)
            self._verdict = list(self._lines(graded, progress))
            self._screen.show([*self._verdict, "", self._menu()])

    def _lines(self, graded: grading.Grading, progress: state.Progress) -> Iterator[str]:
        yield from map(status.verdict, graded.tasks.values())
        if graded.code == grading.FULL_MARKS:
            yield from self._progress(progress)
        else:
            yield from status.explanation(self._folder, self.task, graded)
        if progress.problem:
            yield progress.problem

    def _progress(self, progress: state.Progress) -> Iterator[str]:
        phase = self._folder.phase_of(self.task)
        yield status.phase_line(phase, progress)
        yield from status.built(phase, progress)
        following = progress.next_task(self._folder, self.task)
        if following:
            remark = status.remark(self._folder, progress, following, self.task)
            yield f"Next: {following.heading}{remark} (n)"
        else:
            yield status.ALL_PASSED

    def _menu(self) -> str:
        """Return a line with the keys that currently have an effect."""
        progress = state.load(self._folder)
        keys = ["h hint", "c check all", "q quit"]
        if progress.has_passed(self.task):
            if self._folder.has_solution(self.task):
                keys.insert(1, "d diff")
            if progress.next_task(self._folder, self.task):
                keys.insert(0, "n next")
        return f"{'  '.join(keys)}    (grades on every save)"

    # Keys

    def _answer(self, *lines: str) -> None:
        """Show the answer to a key below the verdict."""
        self._screen.show_below(self._verdict, ["", *lines, "", self._menu()])

    def _next(self) -> None:
        progress = state.load(self._folder)
        following = progress.next_task(self._folder, self.task)
        if not progress.has_passed(self.task):
            self._answer(f"{self.task.id} has not passed yet; h shows a hint")
        elif following is None:
            self._answer(*status.built(self._folder.phase_of(self.task), progress))
        else:
            self.task = following
            self.check()

    def _hint(self) -> None:
        with self._refusals():
            taken = hints.take(self._folder, self.task, state.load(self._folder))
            rest = "Press h again for the next hint"
            if taken.level == len(HINTS):
                rest = "That was the last hint."
            self._answer(taken.title, "", *paragraphs(taken.text), "", rest)

    def _diff(self) -> None:
        if not state.load(self._folder).has_passed(self.task):
            self._answer(f"{self.task.id} has not passed yet: the solution is shown once it has")
            return
        with self._refusals():
            lines = compare.diff(self._folder, self.task).splitlines()
            self._screen.show([*(lines or ["the same as the solution"]), "", self._menu()])

    def _check_all(self) -> None:
        """Grade the tasks one by one, showing each verdict as it arrives; q stops the run."""
        self._screen.show(["grading all tasks …"])
        problems: list[str] = []
        with self._refusals():
            for task in self._folder.course.tasks:
                graded = self._grade(task)
                if QUIT in self._pending:
                    return
                grading.remember(self._folder, graded)
                problems = problems or list(status.failure(graded))
                verdicts = map(status.verdict, graded.tasks.values())
                self._screen.add(list(verdicts) or [f"✘ {task.id}: none"])
            overview = status.overview(self._folder, state.load(self._folder))
            self._screen.show([*overview, *problems, "", self._menu()])

    def _grade(self, task: Task) -> grading.Grading:
        """Grade a task; sort the events that arrived meanwhile: quit, then saves, then keys."""
        arguments = [*grading.for_task(self._folder, task), *self._options]
        graded = grading.grade(self._folder, arguments, self._run)
        events = dict.fromkeys([*self._pending, *_drained(self._events)])
        self._pending = sorted(events, key=lambda event: (event != QUIT, event != SAVED))
        return graded

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (LearnerError, CourseError) as error:
            self._answer(str(error))


def _next(events: Events) -> str:
    """Wait for an event, waking up regularly.

    Waking up is necessary because a signal does not wake the main thread if it arrives just before
    the thread starts to wait for a lock.
    """
    while True:
        with suppress(Empty):
            return events.get(timeout=LOOK_UP_S)


def _drained(events: Events) -> Iterator[str]:
    try:
        while True:
            yield events.get_nowait()
    except Empty:
        return


# Sources of events


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
def keys_into(events: Events, leave: Callable[[], None]) -> Iterator[None]:
    """Put every key that is pressed in the terminal into the queue, without waiting for Enter.

    Args:
        events: Queue of events.
        leave: Function that ends a grading run; called when q is pressed, in another thread.
    """
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    threading.Thread(target=_follow_keys, args=(events, leave), daemon=True).start()
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)  # not TCSADRAIN, which may hang


def _follow_keys(events: Events, leave: Callable[[], None]) -> None:
    while (key := sys.stdin.read(1).lower()) and key != QUIT:
        events.put(key)
    events.put(QUIT)  # q was typed, or the terminal has gone
    leave()
