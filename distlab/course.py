"""The course: its phases, lessons and tasks, as course.toml lists them.

course = load(Path("."))
task = course.task("1.5")
task.function, task.template          # "broadcast", phase1_data_parallel/template_collectives.py
task.guide                            # "guidelines.md#15-broadcast-along-a-tree"
"""

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from distlab.util.text import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "course.toml"
HINTS = (1, 2, 3)  # a question; the idea; names and number of lines
DIFFICULTIES = range(1, 6)
LABEL_WIDTH = 32  # of a column of labels, at least
# Outcomes that mean something here, and all but passed.
PASSED, TODO, HANG, GRADER_ERROR = "passed", "todo", "hang", "grader error"
OUTCOMES = ("failed", TODO, HANG, "crash", "oom", "import error", "not run", GRADER_ERROR)


Entry = TypeVar("Entry")


class CourseError(ValueError):
    """course.toml cannot be used, or something is asked for that it does not list."""


@dataclass(frozen=True)
class Task:
    """One function that a learner writes."""

    id: str  # "1.5": of phase 1 the fifth
    function: str  # as in the lesson's file; a method as "Trainer.fit"
    title: str
    points: int
    minutes: int
    difficulty: int  # 1 to 5
    lesson: str  # name of the file without ``template_`` and ``.py``
    folder: str  # of the phase
    also: tuple[str, ...] = ()  # further functions of the file that are written and graded with it
    preload: tuple[str, ...] = ()  # modules that its tests load and that take a second
    uses: tuple[str, ...] = ()  # ids of the earlier tasks whose functions the solution calls

    @property
    def functions(self) -> tuple[str, ...]:
        """All that a learner writes for it; first the one it is named after."""
        return (self.function, *self.also)

    @property
    def names(self) -> tuple[str, ...]:
        """What there is to write, as texts name it: several methods of a class are the class."""
        holders = [name.rpartition(".")[0] for name in self.functions]
        return tuple(
            dict.fromkeys(
                holder if holder and holders.count(holder) > 1 else name
                for name, holder in zip(self.functions, holders, strict=True)
            )
        )

    @property
    def label(self) -> str:
        """Name what there is to write: "exchange", "LossScaler", "parallelize_mlp and 1 more"."""
        first, *more = self.names
        return f"{first} and {len(more)} more" if more else first

    @property
    def template(self) -> Path:
        """The learner's file, from the root of the course."""
        return Path(self.folder, f"template_{self.lesson}.py")

    @property
    def solution(self) -> Path:
        """The solution's file, from the root of the course."""
        return Path("solutions", self.folder, f"{self.lesson}.py")

    @property
    def heading(self) -> str:
        """Title of the task's section in guidelines.md."""
        return f"{self.id} {self.title}"

    @property
    def guide(self) -> str:
        """Where the task is explained, as a link within the phase's folder."""
        return f"guidelines.md#{anchor(self.heading)}"


@dataclass(frozen=True)
class Challenge:
    """The open task at the end of a phase: no recipe, no points, a figure."""

    function: str
    title: str
    lesson: str  # as a task's
    folder: str  # of the phase

    @property
    def template(self) -> Path:
        """The learner's file, from the root of the course."""
        return Path(self.folder, f"template_{self.lesson}.py")


@dataclass(frozen=True)
class Lesson:
    """One file, and the tasks in it."""

    name: str
    title: str
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class Phase:
    """One folder of lessons."""

    number: int
    title: str
    folder: str
    lessons: tuple[Lesson, ...]
    challenge: Challenge | None = None
    unfinished: bool = False  # tasks are still to come: ids may leave gaps, points miss the hundred

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Of all lessons, as their ids count them: those of two lessons may alternate."""
        return tuple(sorted((t for lesson in self.lessons for t in lesson.tasks), key=_number))

    @property
    def points(self) -> int:
        """Of all tasks together."""
        return sum(task.points for task in self.tasks)


@dataclass(frozen=True)
class Course:
    """All phases, in order. What is asked for and not there is a CourseError naming the nearest."""

    title: str
    phases: tuple[Phase, ...]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Of all phases, in order."""
        return tuple(task for phase in self.phases for task in phase.tasks)

    def task(self, id: str) -> Task:
        """Look a task up by its id, "1.5"."""
        return _look_up("task", id, {task.id: task for task in self.tasks})

    def builds_on(self, task: Task) -> tuple[Task, ...]:
        """Return all earlier tasks that a task uses, itself or through others, in order."""
        return used_by(task, self.tasks)

    def phase(self, number: int) -> Phase:
        """Look a phase up by its number."""
        by_number = {str(phase.number): phase for phase in self.phases}
        return _look_up("phase", str(number), by_number)


def used_by(task: Task, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Return those of ``tasks``, in the course's order, that a task uses, itself or by others."""
    ids = set(task.uses)
    for other in reversed(tasks):
        if other.id in ids:
            ids.update(other.uses)
    return tuple(other for other in tasks if other.id in ids)


def label_width(tasks: Iterable[Task]) -> int:
    """Return the width of a column of labels, with a gap behind the longest."""
    return max([LABEL_WIDTH, *(len(task.label) + 2 for task in tasks)])


def load(root: Path) -> Course:
    """Read course.toml of the course whose folder is ``root``.

    Raises:
        CourseError: it is not there, is not TOML, or says something that cannot be; one line.
    """
    path = root / FILE
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise CourseError(f"{path}: not found. Is {root.resolve()} the course's folder?") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CourseError(f"{path}: {error}") from None
    try:
        return _course(table)
    except CourseError as error:
        raise CourseError(f"{path}: {error}") from None


def anchor(heading: str) -> str:
    """Return what a link to a heading of a Markdown file ends in, as GitHub makes it.

    >>> anchor("1.6 All-reduce, the naive way")
    '16-all-reduce-the-naive-way'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# From tables to dataclasses


def _course(table: dict[str, Any]) -> Course:
    _check_keys("course", table, ["title", "phase"])
    course = Course(_text("course", table, "title"), tuple(map(_phase, _tables(table, "phase"))))
    _check_unique("phase", [str(phase.number) for phase in course.phases])
    _check_unique("lesson", [lesson.name for phase in course.phases for lesson in phase.lessons])
    _check_unique("task", [task.id for task in course.tasks])
    _check_uses(course.tasks)
    open_tasks = [phase.challenge.function for phase in course.phases if phase.challenge]
    functions = [name for task in course.tasks for name in task.functions]
    _check_unique("function", [*functions, *open_tasks])
    return course


def _check_uses(tasks: Sequence[Task]) -> None:
    for place, task in enumerate(tasks):
        earlier = [other.id for other in tasks[:place]]
        for id in task.uses:
            if id not in earlier:
                raise CourseError(f"task {task.id}: uses {id!r}, which is not an earlier task")


def _phase(table: dict[str, Any]) -> Phase:
    where = f"phase {table.get('number', '?')}"
    optional = ["challenge", "unfinished"]
    _check_keys(where, table, ["number", "title", "folder", "lesson"], optional)
    number, folder = _count(where, table, "number"), _text(where, table, "folder")
    lessons = tuple(_lesson(number, folder, lesson) for lesson in _tables(table, "lesson"))
    challenge = _challenge(folder, table["challenge"]) if "challenge" in table else None
    unfinished = _flag(where, table, "unfinished")
    phase = Phase(number, _text(where, table, "title"), folder, lessons, challenge, unfinished)
    _check_ids(phase)
    return phase


def _check_ids(phase: Phase) -> None:
    """Check that the ids count the tasks, without gaps once all are there."""
    for lesson in phase.lessons:
        for before, task in pairwise(lesson.tasks):
            if _number(task) <= _number(before):
                raise CourseError(f"task {task.id} comes after {before.id} in {lesson.name}")
    place = 0
    for task in phase.tasks:
        expected = f"{phase.number}.{place + 1}"
        is_later = task.id == f"{phase.number}.{_number(task)}" and _number(task) > place
        if not is_later or (task.id != expected and not phase.unfinished):
            raise CourseError(f"task {task.id} stands where {expected} should")
        place = _number(task)


def _number(task: Task) -> int:
    """Return the place that a task's id gives it in its phase; 0 where it gives none."""
    number = task.id.partition(".")[2]
    return int(number) if number.isdecimal() else 0


def _challenge(folder: str, table: object) -> Challenge:
    if not isinstance(table, dict):
        raise CourseError(f"challenge of {folder} must be a table, [phase.challenge]")
    where = f"challenge {table.get('function', '?')}"
    _check_keys(where, table, ["function", "title", "lesson"])
    function, title, lesson = (_text(where, table, key) for key in ("function", "title", "lesson"))
    return Challenge(function, title, lesson, folder)


def _lesson(phase: int, folder: str, table: dict[str, Any]) -> Lesson:
    where = f"phase {phase}, lesson {table.get('name', '?')}"
    _check_keys(where, table, ["name", "title", "task"])
    name = _text(where, table, "name")
    tasks = tuple(_task(folder, name, task) for task in _tables(table, "task"))
    return Lesson(name, _text(where, table, "title"), tasks)


def _task(folder: str, lesson: str, table: dict[str, Any]) -> Task:
    where = f"task {table.get('id', '?')}"
    optional = ["also", "preload", "uses"]
    given = [entry.name for entry in fields(Task) if entry.name not in ("lesson", "folder")]
    _check_keys(where, table, [name for name in given if name not in optional], optional)
    return Task(
        id=_text(where, table, "id"),
        function=_text(where, table, "function"),
        title=_text(where, table, "title"),
        points=_count(where, table, "points"),
        minutes=_count(where, table, "minutes"),
        difficulty=_choice(where, table, "difficulty", DIFFICULTIES),
        lesson=lesson,
        folder=folder,
        also=_names(where, table, "also"),
        preload=_names(where, table, "preload"),
        uses=_names(where, table, "uses"),
    )


def _names(where: str, table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = table.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise CourseError(f'{where}: {key} must be like ["name"], not {names!r}')
    return tuple(names)


def _flag(where: str, table: Mapping[str, Any], key: str) -> bool:
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise CourseError(f"{where}: {key} must be true or false, not {value!r}")
    return value


def _check_keys(
    where: str, table: Mapping[str, Any], needed: Sequence[str], optional: Sequence[str] = ()
) -> None:
    for key in table:
        if key not in (*needed, *optional):
            raise CourseError(
                f"{where}: unknown key {key!r}. {_nearest(key, [*needed, *optional])}"
            )
    for key in needed:
        if key not in table:
            raise CourseError(f"{where}: {key} is missing")


def _check_unique(kind: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise CourseError(f"{kind} {name} is listed twice")


def _tables(table: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    entries = table[key]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CourseError(f"{key} must be a list of tables, [[{key}]]")
    return entries


def _text(where: str, table: Mapping[str, Any], key: str) -> str:
    value = table[key]
    if not isinstance(value, str) or not value:
        raise CourseError(f"{where}: {key} must be text, not {value!r}")
    return value


def _count(where: str, table: Mapping[str, Any], key: str) -> int:
    value = table[key]
    if type(value) is not int or value < 1:
        raise CourseError(f"{where}: {key} must be a whole number from 1 on, not {value!r}")
    return value


def _choice(where: str, table: Mapping[str, Any], key: str, valid: Sequence[int]) -> int:
    value = _count(where, table, key)
    if value not in valid:
        raise CourseError(f"{where}: {key} must be {valid[0]} to {valid[-1]}, not {value}")
    return value


def _look_up(kind: str, name: str, entries: Mapping[str, Entry]) -> Entry:
    if name not in entries:
        raise CourseError(f"there is no {kind} {name!r}. {_nearest(name, entries)}")
    return entries[name]


def _nearest(name: str, valid: Collection[str]) -> str:
    """Name the most similar of the valid names, or all of them if none is similar."""
    return did_you_mean(name, valid) or f"There are: {', '.join(valid)}."
