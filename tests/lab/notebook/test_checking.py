"""What of a cell goes into a task's template: `%%check` and `%save`."""

import dataclasses
from pathlib import Path

import pytest

from distlab.course import Task
from distlab.learner import folder
from distlab.learner.folder import CourseFolder, LearnerError
from distlab.notebook.checking import spliced

FUNCTION = "def ring_reduce_scatter(x, group=None):\n    return helper(x) * SCALE\n"
CELL = f"""import cmath
import torch
from dataclasses import dataclass
SCALE = 2

@dataclass
class Pair:
    first: int

def helper(x):
    return x

{FUNCTION}
x = torch.ones(4)
print(ring_reduce_scatter(x))
"""
TEMPLATE = '''"""Task 3.1."""
import torch

def other():
    raise NotImplementedError("Task 3.2: …")


def ring_reduce_scatter(x, group=None):
    raise NotImplementedError("Task 3.1: …")
'''


@pytest.fixture
def course(tmp_path: Path) -> CourseFolder:
    here = folder.find(Path(__file__))
    (tmp_path / task_of(here).template).parent.mkdir()
    (tmp_path / task_of(here).template).write_text(TEMPLATE)
    return dataclasses.replace(here, root=tmp_path)


def task_of(course: CourseFolder) -> Task:
    return course.task("3.1")


def after(course: CourseFolder, cell: str) -> str:
    return spliced(course, task_of(course), cell).decode()


def test_a_function_comes_with_what_it_uses_and_without_its_trials(course: CourseFolder) -> None:
    text = after(course, CELL)
    before, own = text.split("def ring_reduce_scatter")
    assert own == FUNCTION.removeprefix("def ring_reduce_scatter")
    for helper in ("import cmath\n", "SCALE = 2\n", "@dataclass\nclass Pair", "def helper(x):"):
        assert helper in before
    assert text.count("import torch") == 1
    assert "torch.ones" not in text
    assert "print" not in text


def test_a_cell_that_is_saved_again_replaces_what_it_had_added(course: CourseFolder) -> None:
    path = course.root / task_of(course).template
    path.write_text(after(course, CELL))
    assert after(course, CELL) == path.read_text()
    edited = CELL.replace("    return x\n", "    return -x\n\nOTHER = 3\n")
    text = after(course, edited)
    assert text.count("def helper") == 1
    assert "OTHER = 3" in text
    assert "    return -x\n" in text


def test_functions_of_other_tasks_are_replaced_in_place(course: CourseFolder) -> None:
    text = after(course, f"{FUNCTION}\ndef other():\n    return 1\n")
    assert text.count("def other") == 1
    assert "Task 3.2" not in text


def test_a_cell_without_the_function_is_refused(course: CourseFolder) -> None:
    with pytest.raises(LearnerError, match="does not define ring_reduce_scatter"):
        after(course, "def another(): pass")
