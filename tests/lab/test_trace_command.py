"""``distlab trace`` without a task: which one it draws, and that it says so."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from commands import distlab

from distlab import course
from distlab.learner import folder, state, trace_programs
from distlab.learner.folder import CourseFolder, LearnerError

ROOT = Path(__file__).parents[2]
PHASE = "phase1_data_parallel"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CourseFolder:
    """A fresh copy of the course."""
    shutil.copy(ROOT / "course.toml", tmp_path)
    shutil.copytree(ROOT / PHASE, tmp_path / PHASE, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    return folder.find()


def solve_collectives(here: CourseFolder) -> None:
    solution = here.course.task("1.4").solution
    shutil.copy(ROOT / solution, here.root / here.course.task("1.4").template)


def has_come_out(here: CourseFolder, **outcomes: str) -> None:
    """Pretend that tasks, as t1_4, were graded."""
    named = {name[1:].replace("_", "."): outcome for name, outcome in outcomes.items()}
    state.remember(here, {id: state.Record(outcome) for id, outcome in named.items()})


def chosen(here: CourseFolder) -> str:
    task, why = trace_programs.choose(here, state.load(here))
    return f"{task.id}, {why}"


def test_the_last_graded_comes_first_if_it_can_be_drawn(here: CourseFolder) -> None:
    has_come_out(here, t1_7="failed")
    has_come_out(here, t1_4="hang")
    assert chosen(here) == "1.4, the last one graded"
    has_come_out(here, t1_7="passed")
    has_come_out(here, t1_5="todo", t1_13="failed")
    assert chosen(here) == "1.7, the last one graded"


def test_what_is_written_comes_before_what_is_to_be_written(here: CourseFolder) -> None:
    solve_collectives(here)
    assert chosen(here) == "1.4, which is written"


def test_else_it_is_the_next_one_that_can_be_drawn(here: CourseFolder) -> None:
    assert chosen(here) == "1.3, the next"
    has_come_out(here, t1_1="passed", t1_2="todo")
    assert chosen(here) == "1.3, the next"


def test_on_a_fresh_course_it_is_one_line_that_says_what_to_write(
    here: CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distlab("trace") == 1
    printed = capsys.readouterr()
    task = here.course.task("1.3")
    line = f"1.3 scatter_batch is not written yet: write it in {task.template}\n"
    assert (printed.out, printed.err) == (line, "")


def test_it_says_which_task_it_draws_and_why(
    here: CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    solve_collectives(here)
    assert distlab("trace", "--ranks", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1.4 exchange, which is written:"
    assert lines[-1] == "out/trace-1.4.png: who did what when"


def test_a_course_without_pictures_says_so(here: CourseFolder) -> None:
    phase = here.course.phases[0]
    first = replace(phase.lessons[0], tasks=phase.lessons[0].tasks[:1])
    other = replace(here.course, phases=(replace(phase, lessons=(first,)),))
    bare = CourseFolder(here.root, course.Course(other.title, other.phases))
    with pytest.raises(LearnerError, match="no picture of any task"):
        trace_programs.choose(bare, state.load(bare))
