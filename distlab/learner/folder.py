"""The course's folder, in which a command works, and the look-up of tasks by name."""

import re
from dataclasses import dataclass
from pathlib import Path

from distlab import course
from distlab.course import Course, Phase, Task
from distlab.util.text import did_you_mean

PRIVATE = ".distlab"  # folder in which the commands keep their state; ignored by git


class LearnerError(Exception):
    """A command cannot be carried out; the message is one line and names an alternative."""


class WriteError(LearnerError):
    """A file cannot be written, whatever the arguments are."""


@dataclass(frozen=True)
class CourseFolder:
    """A folder with a course.toml, and the course that it lists."""

    root: Path
    course: Course

    @property
    def private(self) -> Path:
        """Folder in which the commands keep their state."""
        return self.root / PRIVATE

    def suite(self, phase: Phase) -> Path:
        """Return the path of a phase's grading suite, relative to the root."""
        return Path("tests", f"test_phase{phase.number}.py")

    def phase_of(self, task: Task) -> Phase:
        """Return the phase that a task belongs to."""
        return next(phase for phase in self.course.phases if task in phase.tasks)

    def has_solution(self, task: Task) -> bool:
        """Return True if the solution exists; the students' version has none."""
        return (self.root / task.solution).is_file()

    def guide(self, task: Task) -> Path:
        """Return the path of the guidelines of the task's phase."""
        return self.root / task.folder / "guidelines.md"

    def task(self, name: str) -> Task:
        """Look up a task by its id, or by one of its functions or classes.

        Raises:
            LearnerError: There is no such task; the message suggests the nearest name.
        """
        for task in self.course.tasks:
            if name in _words(task):
                return task
        raise LearnerError(f"there is no task {name!r}{self._nearest(name)}")

    def _nearest(self, name: str) -> str:
        tasks, number = self.course.tasks, name.partition(".")[0]
        is_of_phase = re.fullmatch(r"\d+\.\d+", name) is not None
        if is_of_phase and number not in {str(phase.number) for phase in self.course.phases}:
            return (
                f": phase {number} is not in this course's folder yet; there are {tasks[0].id} to "
                f"{tasks[-1].id}"
            )
        valid = [word for task in self.course.tasks for word in _words(task)]
        every_id = ", ".join(task.id for task in self.course.tasks)
        return f". {did_you_mean(name, valid) or f'There are: {every_id}.'}"


def _words(task: Task) -> tuple[str, ...]:
    """Return the words that may stand for a task in a command's arguments."""
    return (task.id, *task.functions, *task.names)


def find(start: Path | None = None) -> CourseFolder:
    """Return the course's folder: ``start`` (by default, the working folder) or one of its parents.

    Raises:
        LearnerError: Neither ``start`` nor any of its parents is the course's folder.
        CourseError: The folder's course.toml cannot be used.
    """
    try:
        start = (start or Path.cwd()).resolve()
    except FileNotFoundError:
        raise LearnerError(f"this folder has been removed: {_where_to_go()}") from None
    for root in (start, *start.parents):
        if (root / course.FILE).is_file():
            return CourseFolder(root, course.load(root))
    raise LearnerError(
        f"{start} is not in the course's folder: no {course.FILE} here or above; {_where_to_go()}"
    )


def _where_to_go() -> str:
    """Return the command that changes to the course's folder, if this package lies in one."""
    home = Path(__file__).parents[2]
    return f"cd {home if (home / course.FILE).is_file() else 'to the folder that has it'}"
