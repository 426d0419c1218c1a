"""Helpers that run the ``distlab`` command on a small copy of the course."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from own_phases import copy_first_phases

from distlab import course
from distlab.cli import main
from distlab.grade import reports
from distlab.grade.outcomes import Outcome, Verdict
from distlab.grade.results import GradeResult, TaskResult, TestResult
from distlab.grade.submission import Submission
from distlab.learner import folder, grading, source, state
from distlab.learner.folder import CourseFolder

ROOT = Path(__file__).parents[2]
COURSE = course.load(ROOT)
PHASE = "phase1_data_parallel"
FILE = Path(PHASE, "template_collectives.py")
SUITE = """
import torch
import torch.distributed as dist

from distlab.grade import check, task

@task("1.3")
def test_a_pair_swaps(grade):
    check(grade.run(swap, 2).results == [1.0, 0.0], "The ranks do not swap.")

def swap(lesson):
    mine, other = torch.full((1,), float(dist.get_rank())), torch.empty(1)
    lesson.exchange(mine, 1 - dist.get_rank(), other, 1 - dist.get_rank())
    return float(other)

@task("1.7")
def test_a_pair_adds_up(grade):
    check(grade.run(add, 2).results == [1.0, 1.0], "The ranks do not add up.")

def add(lesson):
    x = torch.full((1,), float(dist.get_rank()))
    lesson.all_reduce_recursive_doubling(x)
    return float(x)
"""
TODO = '    raise NotImplementedError("Task 1.3: exchange, see '
DEADLOCK = "    dist.send(outgoing, dst)\n    dist.recv(incoming, src)\n"
WRONG = "    incoming.copy_(outgoing)\n"
RIGHT = """    both = [dist.P2POp(dist.isend, outgoing, dst), dist.P2POp(dist.irecv, incoming, src)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
"""


def distlab(*arguments: object) -> int:
    """Run ``distlab`` in this process, and return its exit code."""
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


def started(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run ``distlab`` in a separate process; ``options`` go to ``subprocess.run``."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "distlab", *arguments]
    return subprocess.run(command, **{**pipes, "env": grading.environment(), **options}, text=True)


def copy_course(target: Path, num_phases: int = 1) -> CourseFolder:
    """Copy the first phases and Phase 1's solutions; give each phase a suite of two small tests.

    Return the folder of the copy.
    """
    copy_first_phases(ROOT, target, count=num_phases)
    shutil.copy(ROOT / "pyproject.toml", target)
    (target / "tests").mkdir()
    here = folder.find(target)
    for phase in here.course.phases:
        copy_folder(phase.folder, target)
        (target / here.suite(phase)).write_text(SUITE)
    copy_folder(f"solutions/{PHASE}", target)
    return here


def copy_folder(name: str, target: Path) -> None:
    """Copy a course folder into ``target``."""
    shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))


def hand_in(folder: Path, **files: str) -> Submission:
    """Write ``files``, given as ``name=text``, as Phase 1 lessons; return the submission."""
    (folder / PHASE).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / PHASE / f"{name}.py").write_text(text)
    return Submission(folder)


def write_exchange(here: CourseFolder, body: str) -> None:
    """Write the template into the course copy, with ``body`` in place of Task 1.3's TODO."""
    lines = (ROOT / FILE).read_text().splitlines(keepends=True)
    (place,) = (k for k, line in enumerate(lines) if line.startswith(TODO))
    lines[place] = body
    (here.root / FILE).write_text("".join(lines))


def grade_as(here: CourseFolder, **outcomes: str) -> None:
    """Record outcomes such as ``t1_3="passed"``, as if the tasks had been graded."""
    tasks = {here.task(name[1:].replace("_", ".")): text for name, text in outcomes.items()}
    records = {
        task.id: state.Record(outcome, source.digest(here, task)) for task, outcome in tasks.items()
    }
    state.remember(here, records)


def result_of(
    id: str,
    outcome: str,
    *,
    message: str = "Why.",
    details: str = "",
    kind: str = "",
    missing: tuple[str, str] | None = None,
    world_size: int = 0,
    expected: int = 1,
    lent: Sequence[str] = (),
) -> TaskResult:
    """Return the result of a task whose only test had this outcome."""
    verdict = Verdict(Outcome(outcome), message, details, kind=kind, missing=missing)
    test = TestResult("test_a", "sim", verdict, 0.1, world_size)
    borrowed = tuple(map(COURSE.task, lent))
    return TaskResult(COURSE.task(id), "file.py", "", expected, tests=[test], lent=borrowed)


def reporting(code: int, *results: TaskResult, output: str = "") -> grading.RunPytest:
    """Return a stand-in for pytest that reports the results, if any, and returns ``code``."""

    def run(arguments: list[str]) -> tuple[int, str]:
        if results:
            report = Path(arguments[-1].removeprefix("json="))
            report.write_text(reports.FORMATS["json"](GradeResult("here", results, 1.0)))
            assert json.loads(report.read_text())["tasks"]
        return code, output

    return run
