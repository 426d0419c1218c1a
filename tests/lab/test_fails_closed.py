"""Submissions that never did the task score nothing, end in time, and hide nothing else."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from distlab.learner import folder
from distlab.learner.grader_server import WarmGrader

ROOT = Path(__file__).parents[2]
PHASE = "phase1_data_parallel"
SIGNATURE = "def exchange(outgoing, dst, incoming, src, group=None):\n"
SUITE_S = 400.0
FOR_EVER = "98765.4321"  # seconds, and a name to find a child process by


@pytest.fixture(autouse=True, scope="module")
def _nothing_survives() -> Iterator[None]:
    """After the file, no process that a submission has started is left."""
    yield
    assert not left_behind()


def left_behind() -> list[psutil.Process]:
    """Find the child of ``LEAVES_A_CHILD``, wherever it may hang in the tree."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if FOR_EVER in (process.info["cmdline"] or [])]


def hand_in(folder: Path, *, at_import: str = "", body: str = "") -> Path:
    """Copy the solutions; break ``collectives``, at its top or in ``exchange``."""
    (folder / PHASE).mkdir(parents=True)
    for file in (ROOT / "solutions" / PHASE).glob("*.py"):
        text = file.read_text().replace(f"solutions.{PHASE}", PHASE)
        (folder / PHASE / file.name).write_text(text)
    lesson = folder / PHASE / "collectives.py"
    replaced = f"\n\n{SIGNATURE}    {body}\n" if body else ""
    lesson.write_text(f"{lesson.read_text()}{replaced}\n{at_import}\n")
    return folder


Graded = Callable[[Path, str], dict[str, Any]]


@pytest.fixture(scope="module")
def graded() -> Iterator[Graded]:
    """Grades one task; returns its part of the report, and the exit code.

    As ``distlab watch`` does, in one process for all: what a hand-in does is no end of it.
    """
    grader = WarmGrader(folder.find(ROOT))

    def grade(submission: Path, task: str) -> dict[str, Any]:
        report = submission / "report.json"
        arguments = ["tests/test_phase1.py", "-q", "-k", task, "--report", f"json={report}"]
        arguments += ["--impl", str(submission), "--backend", "sim", "--world-timeout", "2.5"]
        code, output = grader(arguments)
        (found,) = json.loads(report.read_text())["tasks"]
        return {**found, "exit": code, "output": output}

    yield grade
    grader.close()


IN_THE_BODY = [
    ("pass", "failed"),
    ("raise SystemExit(0)", "crash"),
    ("__import__('os')._exit(0)", "crash"),
    ("while True: pass", "hang"),
    ("__import__('time').sleep(1e9); dist.recv(incoming, group=group, group_src=src)", "hang"),
    ("dist.recv(incoming, group=group, group_src=src)", "hang"),
    ("torch.allclose = torch.equal = lambda *args, **more: True", "failed"),
    ("dist.get_rank = lambda group=None: 0", "failed"),
    ("import solutions", "failed"),
    ("import ctypes; ctypes.string_at(0)", "crash"),
]


@pytest.mark.parametrize(("body", "outcome"), IN_THE_BODY, ids=lambda value: str(value)[:40])
def test_what_never_exchanges_scores_nothing(
    graded: Graded, tmp_path: Path, body: str, outcome: str
) -> None:
    found = graded(hand_in(tmp_path, body=body), "1.4")
    assert (found["outcome"], found["points"], found["exit"]) == (outcome, 0, 1), found["output"]


AT_IMPORT = [
    ("raise SystemExit(0)", "import error", "sys.exit(0)"),
    ("def broken(:", "import error", "line"),
    ("from solutions.phase1_data_parallel.collectives import *", "import error", "must not import"),
    ("1 / 0", "import error", "ZeroDivisionError"),
    ("import os; os._exit(0)", "crash", "exit"),
    ("while True: pass", "hang", "time is up"),
]


@pytest.mark.parametrize(("line", "outcome", "says"), AT_IMPORT, ids=lambda value: str(value)[:40])
def test_what_cannot_be_imported_scores_nothing(
    graded: Graded, tmp_path: Path, line: str, outcome: str, says: str
) -> None:
    found = graded(hand_in(tmp_path, at_import=line), "1.4")
    assert (found["outcome"], found["points"], found["exit"]) == (outcome, 0, 1), found["output"]
    assert says in found["output"]


def test_a_lesson_that_is_missing_scores_nothing(graded: Graded, tmp_path: Path) -> None:
    submission = hand_in(tmp_path)
    (submission / PHASE / "collectives.py").unlink()
    found = graded(submission, "1.4")
    assert (found["outcome"], found["points"]) == ("import error", 0), found["output"]


def test_an_empty_lesson_scores_nothing(graded: Graded, tmp_path: Path) -> None:
    submission = hand_in(tmp_path)
    (submission / PHASE / "collectives.py").write_text("")
    found = graded(submission, "1.4")
    assert (found["outcome"], found["points"]) == ("failed", 0), found["output"]


def test_a_template_is_to_be_written_and_its_tests_all_have_a_verdict(
    graded: Graded, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / PHASE, tmp_path / PHASE)
    found = graded(tmp_path, "1.4")
    assert (found["outcome"], found["points"], found["exit"]) == ("todo", 0, 1), found["output"]
    assert len(found["tests"]) == found["tests_expected"] > 1
    assert "Traceback" not in found["output"]


def test_the_other_tasks_are_still_graded(graded: Graded, tmp_path: Path) -> None:
    found = graded(hand_in(tmp_path, body="while True: pass"), "1.5")
    assert (found["outcome"], found["exit"]) == ("passed", 0), found["output"]


READS_THE_TESTS = """
def exchange(outgoing, dst, incoming, src, group=None):
    import pathlib
    assert "test_a_ring_exchanges" in pathlib.Path("tests/phase1/judge_exchange.py").read_text()
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
HOLDS_THE_GIL = """
def all_reduce_recursive_doubling(x, group=None):
    __import__("re").match("(a+)+$", 40 * "a" + "b")
"""
FLOODS = """
def broadcast_parameters(module, src=0, group=None):
    while True:
        print(1000 * "flood ")
"""
LEAVES_A_CHILD = f"""
def average_gradients(*args, **more):
    import subprocess
    subprocess.Popen(["sleep", "{FOR_EVER}"], start_new_session=True)
average_gradients_flat = average_gradients
"""
# Task -> a test of it, what must come of it, and a part of the message.
SIX_AT_ONCE = {
    "1.3": ("test_scattering_inside_a_group", "passed", ""),
    "1.4": ("test_both_directions_travel_at_the_same_time", "failed", "message"),
    "1.5": ("test_broadcast_from_every_rank_of_every_kind", "crash", "os._exit(0)"),
    "1.6": ("test_naive_gives_all_ranks_the_same_bits", "oom", "memory"),
    "1.7": ("test_doubling_inside_a_group", "hang", "in all_reduce_recursive_doubling"),
    "1.9": ("test_each_tensor_travels_once", "hang", "in broadcast_parameters"),
    "1.10": ("test_gradients_inside_a_group", "failed", ""),
}


@pytest.mark.usefixtures("forked")
def test_six_bad_functions_of_one_submission_have_six_verdicts(tmp_path: Path) -> None:
    """One run of pytest: what one task does to the machine changes no other one's verdict."""
    bad = READS_THE_TESTS + LEAVES_BY_EXIT + ALLOCATES + HOLDS_THE_GIL
    submission = hand_in(tmp_path, at_import=bad)
    trainer = submission / PHASE / "trainer.py"
    trainer.write_text(trainer.read_text() + FLOODS + LEAVES_A_CHILD)
    tests = [f"tests/test_phase1.py::{test}" for test, _, _ in SIX_AT_ONCE.values()]
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pytest", *tests, "-q", "--impl", str(submission)]
    command += ["--report", f"json={report}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SUITE_S)
    found = {task["id"]: task for task in json.loads(report.read_text())["tasks"]}
    for task, (test, outcome, says) in SIX_AT_ONCE.items():
        verdicts = [(t["outcome"], t["message"]) for t in found[task]["tests"]]
        assert verdicts, f"{test} has no verdict"
        assert all(o == outcome and says in m for o, m in verdicts), f"{test}: {verdicts}"
    assert [t["world"] for t in found["1.5"]["tests"]] == ["sim", "gloo"]
    assert ended.returncode == 1
    assert len(ended.stdout) < 100_000, "the flood reaches the terminal"
    assert not left_behind()
