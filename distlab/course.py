"""The course: its phases, lessons and tasks, as course.toml lists them.

course = load(Path("."))
task = course.task("1.4")
task.function, task.template          # "broadcast", phase1_data_parallel/template_collectives.py
task.guide                            # "guidelines.md#14-broadcast-along-a-tree"
"""

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from itertools import pairwise
from math import floor
from pathlib import Path
from typing import Any, TypeVar

from distlab.util.text import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "course.toml"
HINTS = (1, 2, 3)  # 1: a question; 2: the idea; 3: names to use, and the number of lines
DIFFICULTIES = range(1, 6)
LABEL_WIDTH = 32  # minimum width of a column of labels
LETTERS = "abcdefgh"  # of a task's graded parts


Entry = TypeVar("Entry")
Table = Mapping[str, Any]  # a table of course.toml


class CourseError(ValueError):
    """course.toml cannot be used, or does not list what a command asks for."""


@dataclass(frozen=True)
class Part:
    """A part of a task that scores by itself, once the parts before it have passed."""

    title: str
    points: int


@dataclass(frozen=True)
class Task:
    """One task: a function for the learner to write, or several functions."""

    id: str  # "1.4" is the fourth task of phase 1
    function: str  # its name in the lesson's file; for a method, such as "Trainer.fit"
    title: str
    points: int
    minutes: int
    difficulty: int  # 1 to 5
    lesson: str  # name of the file without ``template_`` and ``.py``
    folder: str  # folder of the phase
    also: tuple[str, ...] = ()  # further functions, written and graded together with the main one
    preload: tuple[str, ...] = ()  # slow modules that the task's tests load
    uses: tuple[str, ...] = ()  # ids of the earlier tasks whose functions the solution calls
    parts: tuple[Part, ...] = ()  # none: the task is graded as a whole
    share_for_right_values: float = 0.0  # that of the course

    def points_for_values(self, points: int) -> int:
        """Return the share of ``points`` for right values at too high a cost, rounded down."""
        return floor(round(points * self.share_for_right_values, 6))

    @property
    def graded_parts(self) -> dict[str, Part]:
        """The parts by their letters; a task without parts is part "a" of itself."""
        return dict(zip(LETTERS, self.parts or (Part(self.title, self.points),), strict=False))

    @property
    def functions(self) -> tuple[str, ...]:
        """All functions that a learner writes for the task, the main one first."""
        return (self.function, *self.also)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions to write; several methods of a class are listed as the class."""
        holders = [name.rpartition(".")[0] for name in self.functions]
        return tuple(
            dict.fromkeys(
                holder if holder and holders.count(holder) > 1 else name
                for name, holder in zip(self.functions, holders, strict=True)
            )
        )

    @property
    def label(self) -> str:
        """A short form of the names, such as "exchange" or "parallelize_mlp and 1 more"."""
        first, *more = self.names
        return f"{first} and {len(more)} more" if more else first

    @property
    def template(self) -> Path:
        """Path of the learner's file, relative to the root of the course."""
        return Path(self.folder, f"template_{self.lesson}.py")

    @property
    def solution(self) -> Path:
        """Path of the solution's file, relative to the root of the course."""
        return Path("solutions", self.folder, f"{self.lesson}.py")

    @property
    def heading(self) -> str:
        """Title of the task's section in guidelines.md."""
        return f"{self.id} {self.title}"

    @property
    def guide(self) -> str:
        """Link to the explanation of the task, relative to the phase's folder."""
        return f"guidelines.md#{anchor(self.heading)}"


@dataclass(frozen=True)
class Challenge:
    """The open task at the end of a phase: no recipe and no points, only a measured speedup."""

    function: str
    title: str
    lesson: str  # name of the file, as in ``Task``
    folder: str  # folder of the phase

    @property
    def template(self) -> Path:
        """Path of the learner's file, relative to the root of the course."""
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
    unfinished: bool = False  # True if more tasks will be added; ids may then have gaps

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Tasks of all lessons, in order of id; the ids of two lessons may interleave."""
        return tuple(sorted((t for lesson in self.lessons for t in lesson.tasks), key=_number))

    @property
    def points(self) -> int:
        """Total points of all tasks."""
        return sum(task.points for task in self.tasks)


@dataclass(frozen=True)
class Course:
    """All phases, in order. Looking up a missing name raises CourseError, with a suggestion."""

    title: str
    phases: tuple[Phase, ...]
    share_for_right_values: float = 0.0  # of a task's points, where only its costs are too high

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Tasks of all phases, in order."""
        return tuple(task for phase in self.phases for task in phase.tasks)

    def task(self, id: str) -> Task:
        """Look up a task by its id, such as "1.4"."""
        return _look_up("task", id, {task.id: task for task in self.tasks})

    def builds_on(self, task: Task) -> tuple[Task, ...]:
        """Return all earlier tasks that a task uses, directly or indirectly, in order."""
        return used_by(task, self.tasks)

    def phase(self, number: int) -> Phase:
        """Look up a phase by its number."""
        by_number = {str(phase.number): phase for phase in self.phases}
        return _look_up("phase", str(number), by_number)


def used_by(task: Task, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Return the members of ``tasks`` that a task uses, directly or indirectly, in order."""
    ids = set(task.uses)
    for other in reversed(tasks):
        if other.id in ids:
            ids.update(other.uses)
    return tuple(other for other in tasks if other.id in ids)


def label_width(tasks: Iterable[Task]) -> int:
    """Return the width of a column of labels, including a gap after the longest label."""
    return max([LABEL_WIDTH, *(len(task.label) + 2 for task in tasks)])


def load(root: Path) -> Course:
    """Read the course.toml in the folder ``root``.

    Raises:
        CourseError: The file is missing, is not TOML, or does not describe a course. The message
            is one line.
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
    """Return the anchor that GitHub gives to a heading of a Markdown file.

    >>> anchor("1.6 All-reduce, the naive way")
    '16-all-reduce-the-naive-way'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# From tables to dataclasses


def _course(table: Table) -> Course:
    values = _values(Course, "course", table)
    share = values.get("share_for_right_values", 0.0)
    phases = tuple(_phase(phase, share) for phase in _tables(table, "phase"))
    course = Course(**values, phases=phases)
    open_tasks = [phase.challenge.function for phase in course.phases if phase.challenge]
    functions = [name for task in course.tasks for name in task.functions]
    _check_unique("phase", [str(phase.number) for phase in course.phases])
    _check_unique("lesson", [lesson.name for phase in course.phases for lesson in phase.lessons])
    _check_unique("task", [task.id for task in course.tasks])
    _check_uses(course.tasks)
    _check_unique("function", [*functions, *open_tasks])
    return course


def _phase(table: Table, share: float) -> Phase:
    values = _values(Phase, f"phase {table.get('number', '?')}", table)
    number, folder = values["number"], values["folder"]
    lessons = tuple(_lesson(number, folder, share, entry) for entry in _tables(table, "lesson"))
    challenge = _challenge(folder, table["challenge"]) if "challenge" in table else None
    phase = Phase(**values, lessons=lessons, challenge=challenge)
    _check_ids(phase)
    return phase


def _challenge(folder: str, table: object) -> Challenge:
    if not isinstance(table, dict):
        raise CourseError(f"challenge of {folder} must be a table, [phase.challenge]")
    where = f"challenge {table.get('function', '?')}"
    return Challenge(**_values(Challenge, where, table, "folder"), folder=folder)


def _lesson(phase: int, folder: str, share: float, table: Table) -> Lesson:
    values = _values(Lesson, f"phase {phase}, lesson {table.get('name', '?')}", table)
    place = {"folder": folder, "lesson": values["name"], "share_for_right_values": share}
    tasks = tuple(_task(place, task) for task in _tables(table, "task"))
    return Lesson(**values, tasks=tasks)


def _task(place: Mapping[str, Any], table: Table) -> Task:
    where = f"task {table.get('id', '?')}"
    values = _values(Task, where, table, *place)
    if values["difficulty"] not in DIFFICULTIES:
        raise CourseError(f"{where}: difficulty must be 1 to 5, not {values['difficulty']}")
    parts = [Part(**_values(Part, where, part)) for part in _tables(table, "part")]
    if parts and sum(part.points for part in parts) != values["points"]:
        raise CourseError(f"{where}: its parts must add up to its {values['points']} points")
    return Task(**values, **place, parts=tuple(parts))


def _values(kind: type, where: str, table: Table, *inherited: str) -> dict[str, Any]:
    """Return a table's values for a dataclass's plain fields; fields with defaults are optional.

    Nested tables, such as ``[[phase.lesson]]`` for ``lessons``, are only checked for presence.

    Args:
        inherited: Fields that do not come from the table.
    """
    by_key = {_key(field): field for field in fields(kind) if field.name not in inherited}
    for key in table:
        if key not in by_key:
            raise CourseError(f"{where}: unknown key {key!r}. {_nearest(key, by_key)}")
    for key, field in by_key.items():
        if field.default is MISSING and key not in table:
            raise CourseError(f"{where}: {key} is missing")
    plain = [f for f in by_key.values() if f.type in _CHECKS and f.name in table]
    return {field.name: _checked(where, field, table[field.name]) for field in plain}


def _key(field: Field[Any]) -> str:
    return field.name if field.type in _CHECKS else field.name.removesuffix("s")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_share(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1  # type: ignore[operator]


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


# Type of a field -> (check of a value, description of valid values).
_CHECKS: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    str: (_is_text, "text"),
    int: (lambda value: type(value) is int and value > 0, "a whole number from 1 on"),
    float: (_is_share, "a number from 0 to 1"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    tuple[str, ...]: (_is_list_of_names, 'like ["name"]'),
}


def _checked(where: str, field: Field[Any], value: Any) -> Any:
    is_right, wanted = _CHECKS[field.type]
    if not is_right(value):
        raise CourseError(f"{where}: {field.name} must be {wanted}, not {value!r}")
    return tuple(value) if isinstance(value, list) else value


def _tables(table: Table, key: str) -> list[dict[str, Any]]:
    entries = table.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CourseError(f"{key} must be a list of tables, [[{key}]]")
    return entries


def _check_uses(tasks: Sequence[Task]) -> None:
    for place, task in enumerate(tasks):
        earlier = [other.id for other in tasks[:place]]
        for id in task.uses:
            if id not in earlier:
                raise CourseError(f"task {task.id}: uses {id!r}, which is not an earlier task")


def _check_ids(phase: Phase) -> None:
    """Check that the ids number the tasks in order, without gaps unless the phase is unfinished."""
    for lesson in phase.lessons:
        for before, task in pairwise(lesson.tasks):
            if _number(task) <= _number(before):
                raise CourseError(f"task {task.id} comes after {before.id} in {lesson.name}")
    last = 0
    for task in phase.tasks:
        expected = f"{phase.number}.{last + 1}"
        is_later = task.id == f"{phase.number}.{_number(task)}" and _number(task) > last
        if not is_later or (task.id != expected and not phase.unfinished):
            raise CourseError(f"task {task.id} stands where {expected} should")
        last = _number(task)


def _number(task: Task) -> int:
    """Return the position that a task's id gives it in its phase; 0 if the id is malformed."""
    number = task.id.partition(".")[2]
    return int(number) if number.isdecimal() else 0


def _check_unique(kind: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise CourseError(f"{kind} {name} is listed twice")


def _look_up(kind: str, name: str, entries: Mapping[str, Entry]) -> Entry:
    if name not in entries:
        raise CourseError(f"there is no {kind} {name!r}. {_nearest(name, entries)}")
    return entries[name]


def _nearest(name: str, valid: Collection[str]) -> str:
    """Return a hint with the most similar valid name or, if none is similar, all valid names."""
    return did_you_mean(name, valid) or f"There are: {', '.join(valid)}."
