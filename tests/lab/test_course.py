"""course.toml is valid, and lists exactly the templates and solutions that exist."""

import contextlib
import importlib
import inspect
import io
import json
import random
import re
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from own_phases import shipped

from distlab.course import Course, CourseError, Phase, Task, anchor, load
from scripts.templates import TO_FILL_IN, outdated_templates, text_of_template

ROOT = Path(__file__).parents[2]
COURSE = shipped(load(ROOT))
TASKS = COURSE.tasks
TEMPLATES = sorted({task.template for task in TASKS})

each_template = pytest.mark.parametrize("template", TEMPLATES, ids=str)


# --- course.toml ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id", "label"),
    [
        ("1.3", "exchange"),
        ("1.13", "Trainer.fit"),
        ("2.3", "LossScaler"),
        ("2.8", "StageRunner and 2 more"),
    ],
)
def test_a_label_covers_all_functions_of_a_task(id: str, label: str) -> None:
    assert COURSE.task(id).label == label


def test_points_of_a_phase_are_a_hundred() -> None:
    for phase in COURSE.phases:
        assert phase.points < 100 if phase.unfinished else phase.points == 100


SIZE = "points = 5\nminutes = 10\ndifficulty = 2"
SMALL = f"""
title = "Small"
[[phase]]
number = 1
title = "First"
folder = "phase1"
[[phase.lesson]]
name = "sums"
title = "Sums"
[[phase.lesson.task]]
id = "1.1"
function = "add"
title = "Add"
{SIZE}
[[phase.lesson.task]]
id = "1.2"
function = "subtract"
title = "Subtract"
{SIZE}
also = ["minus"]
"""


def small(tmp_path: Path, text: str = SMALL) -> Course:
    (tmp_path / "course.toml").write_text(text, encoding="utf-8")
    return load(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "minutes = 10",
            "minuets = 10",
            "task 1.1: unknown key 'minuets'. Did you mean 'minutes'?",
        ),
        ("minutes = 10\n", "", "task 1.1: minutes is missing"),
        ("points = 5", "points = 0", "points must be a whole number from 1 on, not 0"),
        ("difficulty = 2", "difficulty = 6", "task 1.1: difficulty must be 1 to 5, not 6"),
        ('title = "Add"', "title = 3", "task 1.1: title must be text, not 3"),
        ('["minus"]', "2", 'task 1.2: also must be like ["name"], not 2'),
        ('id = "1.2"', 'id = "1.1"', "task 1.1 comes after 1.1 in sums"),
        ('id = "1.2"', 'id = "1.4"', "task 1.4 stands where 1.2 should"),
        ('"subtract"', '"add"', "function add is listed twice"),
        ("[[phase]]", "[[phases]]", "course: unknown key 'phases'. Did you mean 'phase'?"),
        ("[[phase.lesson]]", "[phase.lesson]", "lesson must be a list of tables, [[lesson]]"),
        ('title = "Small"', "title = ", "course.toml: "),
        (
            'title = "Small"',
            'title = "Small"\nshare_for_right_values = 1.5',
            "course: share_for_right_values must be a number from 0 to 1, not 1.5",
        ),
        ("points = 5", "share_for_right_values = 0.5", "task 1.1: unknown key 'share_for_right"),
        (
            'folder = "phase1"\n',
            'folder = "phase1"\n[phase.challenge]\nfunction = "add"\ntitle = "x"\nlesson = "y"\n',
            "function add is listed twice",
        ),
    ],
)
def test_a_mistake_in_the_file_is_located_in_one_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in SMALL
    with pytest.raises(CourseError) as error:
        small(tmp_path, SMALL.replace(old, new, 1))
    assert message in str(error.value)
    assert "course.toml: " in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("share", "points"), [("", 0), ("0.5", 2), ("1", 5)])
def test_the_course_sets_the_share_of_points_for_right_values(
    tmp_path: Path, share: str, points: int
) -> None:
    line = f"share_for_right_values = {share}\n" if share else ""
    course = small(tmp_path, line + SMALL)
    assert [task.points_for_values(task.points) for task in course.tasks] == [points] * 2


def test_parts_of_a_task_add_up_to_its_points(tmp_path: Path) -> None:
    parts = "".join(
        f'[[phase.lesson.task.part]]\ntitle = "{title}"\npoints = {points}\n'
        for title, points in (("sums", 3), ("overflow", 2))
    )
    first = SMALL.index('id = "1.2"')
    end = SMALL.rindex("[[", 0, first)
    course = small(tmp_path, SMALL[:end] + parts + SMALL[end:])
    whole, other = course.tasks
    assert {letter: part.points for letter, part in whole.graded_parts.items()} == {"a": 3, "b": 2}
    assert [part.points for part in other.graded_parts.values()] == [other.points]
    with pytest.raises(CourseError, match=r"task 1\.1: its parts must add up to its 5 points"):
        small(tmp_path, SMALL[:end] + parts.replace("2", "4") + SMALL[end:])


UNFINISHED = SMALL.replace("number = 1\n", "number = 1\nunfinished = true\n", 1)


def test_an_unfinished_phase_may_lack_tasks_in_between(tmp_path: Path) -> None:
    course = small(tmp_path, UNFINISHED.replace('id = "1.2"', 'id = "1.4"'))
    assert [task.id for task in course.tasks] == ["1.1", "1.4"]


BETWEEN = f"""
[[phase.lesson]]
name = "products"
title = "Products"
[[phase.lesson.task]]
id = "1.2"
function = "multiply"
title = "Multiply"
{SIZE}
"""


def test_tasks_of_two_lessons_may_alternate(tmp_path: Path) -> None:
    tasks = small(tmp_path, SMALL.replace('id = "1.2"', 'id = "1.3"') + BETWEEN).tasks
    assert [(task.id, task.lesson) for task in tasks] == [
        ("1.1", "sums"),
        ("1.2", "products"),
        ("1.3", "sums"),
    ]
    with pytest.raises(CourseError, match=r"task 1\.2 stands where 1\.3 should"):
        small(tmp_path, SMALL + BETWEEN)


@pytest.mark.parametrize(
    ("heading", "link"),
    [
        ("1.6 All-reduce, the naive way", "16-all-reduce-the-naive-way"),
        ("1.8 Measure α and β", "18-measure-α-and-β"),
        ("`fit_it` (again)!", "fit_it-again"),
    ],
)
def test_anchors_match_githubs(heading: str, link: str) -> None:
    assert anchor(heading) == link


# --- templates and solutions ---------------------------------------------------------------------

Stub = Callable[..., object]


def stubs_of(template: Path) -> dict[str, tuple[Task, Stub]]:
    """Import a template; return the functions that learners write, with their tasks."""
    module = importlib.import_module(".".join(template.with_suffix("").parts))
    tasks = [task for task in TASKS if task.template == template]
    return {name: (task, attrgetter(name)(module)) for task in tasks for name in task.functions}


def test_templates_have_the_contracts_of_the_solutions() -> None:
    assert [*map(str, outdated_templates(COURSE))] == [], "run make templates"


SOLUTION = '''"""Sums."""

from solutions.phase1.parts import part

LIMIT = 2
_SECRET = 3


def add(a: int) -> int:
    """Add all parts."""
    return _helper(a)


def _helper(a: int) -> int:
    return a + LIMIT


class Given:
    """A given class."""

    size = part
'''
TEMPLATE = '''"""Sums.

Task 1.1.
"""

from phase1.template_parts import part

LIMIT = 2


def add(a: int) -> int:
    """Add all parts."""
    # TODO 1.1: add.
    raise NotImplementedError("Task 1.1: add, see guidelines.md#11-add")


class Given:
    """A given class."""

    size = part
'''
ADD = Task("1.1", "add", "Add", 5, 10, 2, lesson="sums", folder="phase1")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Add all parts.", "Add all of the parts."),
        ("add(a: int)", "add(a: int, b: int = 0)"),
        ("LIMIT = 2", "LIMIT = 4"),
        ("    size = part\n", "    size = 3 * part\n"),
        ('"""Sums.', '"""Totals.'),
    ],
)
def test_a_changed_solution_changes_its_template(before: str, after: str) -> None:
    assert text_of_template(TEMPLATE, SOLUTION, [ADD]) == TEMPLATE
    changed = text_of_template(TEMPLATE, SOLUTION.replace(before, after), [ADD])
    assert changed == TEMPLATE.replace(before, after)


def test_a_new_lesson_gets_a_template_with_a_todo_to_fill_in() -> None:
    text = text_of_template("", SOLUTION, [ADD])
    assert "# TODO 1.1: " + TO_FILL_IN in text
    assert "from phase1.template_parts import part" in text
    assert "_helper" not in text
    assert text_of_template(text, SOLUTION, [ADD]) == text


@each_template
def test_a_template_shows_no_solution_and_each_stub_says_what_to_write(template: Path) -> None:
    text = (ROOT / template).read_text(encoding="utf-8")
    assert TO_FILL_IN not in text
    assert not re.search(r"^\s*(from|import) (solutions|distlab)", text, re.MULTILINE)
    for task, _ in stubs_of(template).values():
        assert f"# TODO {task.id}: " in text


def call_without_arguments(function: Callable[..., object]) -> None:
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
    ]
    positional = [None for parameter in needed if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    keywords = [parameter.name for parameter in needed if parameter.kind is parameter.KEYWORD_ONLY]
    function(*positional, **dict.fromkeys(keywords))  # *args and **kwargs may be empty


@each_template
def test_a_template_imports_without_side_effects_and_its_stubs_raise(template: Path) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        stubs = stubs_of(template)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert (output.getvalue(), states, dist.is_initialized()) == ("", after, False)
    for name, (task, stub) in stubs.items():
        with pytest.raises(NotImplementedError, match=re.escape(f"Task {task.id}: {name}, see")):
            call_without_arguments(stub)


# --- files ---------------------------------------------------------------------------------------


def files_in(folder: Path) -> set[str]:
    """Return all files except those that tools leave behind."""
    left_behind = ("__pycache__", ".ipynb_checkpoints", ".DS_Store")
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix()
        for path in paths
        if not any(part in left_behind for part in path.parts)
    }


# The production system, which is not a lesson but uses the solutions.
PRODUCTION = {4: ("README.md", "deployment/", "imagenet_trainer.py")}


@pytest.mark.parametrize("phase", COURSE.phases, ids=lambda phase: phase.folder)
def test_a_phase_has_all_its_files_and_no_others(phase: Phase) -> None:
    folder = ROOT / phase.folder
    lessons = {lesson.name for lesson in phase.lessons}
    lessons |= {phase.challenge.lesson} if phase.challenge else set()
    figures = {path.name for path in folder.glob("figures/*")}
    expected = {
        "guidelines.md",
        "explore.ipynb",
        "given.py",
        *(path.name for path in folder.glob("programs.py")),  # if the lessons have a ``main``
        *(f"template_{name}.py" for name in lessons),
    }
    expected |= {f"figures/{name}" for name in figures if Path(name).suffix in (".svg", ".png")}
    assert files_in(folder) == expected
    solved = {f"{name}.py" for name in lessons} | {"__init__.py"}
    existing = files_in(ROOT / "solutions" / phase.folder)
    ignored = PRODUCTION.get(phase.number, ())
    assert {path for path in existing if not path.startswith(ignored)} == solved


NOTEBOOKS = [*ROOT.glob("*.ipynb"), *ROOT.glob("phase*/*.ipynb")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"]] == []


# --- grading -------------------------------------------------------------------------------------

SUITES = {phase: ROOT / f"tests/phase{phase.number}" for phase in COURSE.phases}


@pytest.mark.skipif(not all(map(Path.exists, SUITES.values())), reason="no grading suite yet")
@pytest.mark.parametrize("phase", COURSE.phases, ids=lambda phase: phase.folder)
def test_exactly_the_listed_tasks_are_graded(phase: Phase) -> None:
    suite = importlib.import_module(f"test_phase{phase.number}")
    marks = [mark for test in vars(suite).values() for mark in getattr(test, "pytestmark", [])]
    marked = {mark.args[0] for mark in marks if mark.name == "task"}
    assert marked == {task.id for task in phase.tasks}
    text = (ROOT / f"tests/test_phase{phase.number}.py").read_text(encoding="utf-8")
    collected = re.findall(rf"^from phase{phase.number}\.(\w+) import \*$", text, re.MULTILINE)
    assert {*collected} == {file.stem for file in SUITES[phase].glob("judge_*")}
