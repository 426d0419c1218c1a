"""Submissions that never do the task score nothing, end in time, and hide no other verdict."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from commands import COURSE, PHASE, ROOT

from distlab.grade import WrongResult
from distlab.grade.outcomes import Outcome, Verdict, verdict_on
from distlab.grade.running import Grade
from distlab.grade.submission import Submission
from distlab.launch import LaunchError

FOREVER = "98765.4321"  # seconds that a child process sleeps; also identifies the child


@pytest.fixture(autouse=True, scope="module")
def _nothing_survives() -> Iterator[None]:
    """Check, after the tests of this file, that no process of a submission is left."""
    yield
    assert not left_behind()


def left_behind() -> list[psutil.Process]:
    """Return the children of ``LEAVES_A_CHILD``, wherever they are in the process tree."""
    every = psutil.process_iter(["cmdline"])
    return [process for process in every if FOREVER in (process.info["cmdline"] or [])]


def hand_in(folder: Path, addition: str) -> Path:
    """Copy the solutions, with an addition at the end of ``collectives``."""
    (folder / PHASE).mkdir(parents=True)
    for file in (ROOT / "solutions" / PHASE).glob("*.py"):
        text = file.read_text().replace(f"solutions.{PHASE}", PHASE)
        (folder / PHASE / file.name).write_text(text)
    lesson = folder / PHASE / "collectives.py"
    lesson.write_text(f"{lesson.read_text()}\n\n{addition}\n")
    return folder


def swap(lesson: Any) -> None:
    mine, other = torch.full((1,), float(dist.get_rank())), torch.full((1,), 7.0)
    lesson.exchange(mine, 1 - dist.get_rank(), other, 1 - dist.get_rank())
    if float(other) != 1.0 - float(mine):
        raise WrongResult(f"received {float(other)}")


def verdict_of(folder: Path) -> Verdict:
    """Return the verdict when two ranks swap a number."""
    with pytest.raises(LaunchError) as raised:
        Grade(Submission(folder), COURSE.task("1.3"), "sim", 2.4).run(swap, 2)
    return verdict_on(raised.value)


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("pass", "failed"),
        ("raise SystemExit(0)", "crash"),
        ("__import__('os')._exit(0)", "crash"),
        ("while True: pass", "hang"),
        ("dist.recv(incoming, src)", "hang"),
        ("torch.allclose = torch.equal = lambda *args, **more: True", "failed"),
        ("dist.get_rank = lambda group=None: 0", "failed"),
        ("import solutions", "failed"),
        ("import ctypes; ctypes.string_at(0)", "crash"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_never_exchanges_does_not_pass(tmp_path: Path, body: str, outcome: str) -> None:
    function = f"def exchange(outgoing, dst, incoming, src, group=None):\n    {body}"
    assert verdict_of(hand_in(tmp_path, function)).outcome is Outcome(outcome)


@pytest.mark.parametrize(
    ("line", "outcome", "says"),
    [
        ("raise SystemExit(0)", "import error", "sys.exit(0)"),
        ("def broken(:", "import error", "line"),
        (f"from solutions.{PHASE}.collectives import *", "import error", "must not import"),
        ("import os; os._exit(0)", "crash", "exit"),
        ("del exchange", "failed", "exchange"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_imported_does_not_pass(
    tmp_path: Path, line: str, outcome: str, says: str
) -> None:
    verdict = verdict_of(hand_in(tmp_path, line))
    assert verdict.outcome is Outcome(outcome)
    assert says in verdict.message


READS_THE_TESTS = """
def exchange(outgoing, dst, incoming, src, group=None):
    import pathlib
    assert "test_a_ring_exchanges" in pathlib.Path("tests/phase1/judge_collectives.py").read_text()
    incoming.fill_(float(src))
"""
LEAVES_BY_EXIT = """
def broadcast(x, src=0, group=None):
    __import__("os")._exit(0)
"""
ALLOCATES = """
def all_reduce_naive(x, group=None):
    kept = []
    while True:
        kept.append(torch.ones(2**24))
"""
FLOODS = """
def broadcast_parameters(module, src=0, group=None):
    while True:
        print(1000 * "flood ")
"""
LEAVES_A_CHILD = f"""
def average_gradients(*args, **more):
    import subprocess
    subprocess.Popen(["sleep", "{FOREVER}"], start_new_session=True)
average_gradients_flat = average_gradients
"""
# For each task: one of its tests, the expected outcome, and part of the message.
AT_ONCE = {
    "1.5": ("test_scattering_inside_a_group", "passed", ""),
    "1.3": ("test_both_directions_travel_at_the_same_time", "failed", "message"),
    "1.4": ("test_broadcast_of_every_kind", "crash", "os._exit(0)"),
    "1.6": ("test_naive_gives_all_ranks_the_same_bits", "oom", "memory"),
    "1.9": ("test_each_tensor_travels_once", "hang", "in broadcast_parameters"),
    "1.10": ("test_gradients_inside_a_group", "failed", ""),
}


@pytest.mark.usefixtures("forked")
def test_bad_functions_of_one_submission_have_a_verdict_each(tmp_path: Path) -> None:
    """In one run of pytest, no task changes another's verdict, whatever it does to the machine."""
    submission = hand_in(tmp_path, READS_THE_TESTS + LEAVES_BY_EXIT + ALLOCATES)
    trainer = submission / PHASE / "trainer.py"
    trainer.write_text(trainer.read_text() + FLOODS + LEAVES_A_CHILD)
    tests = [f"tests/test_phase1.py::{test}" for test, _, _ in AT_ONCE.values()]
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pytest", *tests, "-q", "--impl", str(submission)]
    command += ["--report", f"json={report}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    tasks = {task["id"]: task for task in json.loads(report.read_text())["tasks"]}
    for task, (test, outcome, says) in AT_ONCE.items():
        verdicts = [(t["outcome"], t["message"]) for t in tasks[task]["tests"]]
        assert verdicts, f"{test} has no verdict"
        assert all(o == outcome and says in m for o, m in verdicts), f"{test}: {verdicts}"
        assert tasks[task]["points"] == 0, "parts of a task score nothing"
    assert {t["world"] for t in tasks["1.4"]["tests"]} == {"sim", "gloo"}
    assert ended.returncode == 1
    assert len(ended.stdout) < 100_000, "the flood reaches the terminal"
    assert not left_behind()


def test_a_template_is_to_be_written(tmp_path: Path) -> None:
    shutil.copytree(ROOT / PHASE, tmp_path / PHASE)
    verdict = verdict_of(tmp_path)
    assert (verdict.outcome, verdict.missing) == (Outcome.TODO, ("1.3", "exchange"))
    assert verdict.details == ""
