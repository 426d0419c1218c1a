"""The learner's commands, on a copy of the course with a small suite."""

import errno
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from queue import Queue
from typing import Any, get_args

import psutil
import pytest
from commands import distlab
from fresh_pytest import FreshPytest
from own_phases import copy_first_phases

from distlab import course
from distlab.cli import learn
from distlab.grade import plugin, reports
from distlab.grade.outcomes import Outcome
from distlab.learner import folder as folders
from distlab.learner import (
    grading,
    hints,
    resetting,
    source,
    state,
    status,
    templates,
    trace_bodies,
    trace_programs,
    watch,
)
from distlab.learner.folder import CourseFolder, WriteError
from distlab.learner.grader_server import WarmGrader
from distlab.learner.screen import Screen, wrapped

ROOT = Path(__file__).parents[2]
COURSE = course.load(ROOT)
FILE = Path("phase1_data_parallel/template_collectives.py")
SUITE = """
import torch
import torch.distributed as dist

from distlab.grade import check, task

@task("1.4")
def test_a_pair_swaps(grade):
    results = grade.run(swap, 2).results
    check(results == [1.0, 0.0], f"the ranks should hold 1.0 and 0.0, they hold {results}.")

def swap(lesson):
    mine, other = torch.full((1,), float(dist.get_rank())), torch.empty(1)
    lesson.exchange(mine, 1 - dist.get_rank(), other, 1 - dist.get_rank())
    return float(other)
"""
TODO = '    raise NotImplementedError("Task 1.4: exchange, see '
DEADLOCK = "    dist.send(outgoing, dst)\n    dist.recv(incoming, src)\n"
WRONG = "    incoming.copy_(outgoing)\n"
UNBATCHED = """    sending = dist.isend(outgoing, dst)
    dist.recv(incoming, src)
    sending.wait()
"""
RIGHT = """    both = [dist.P2POp(dist.isend, outgoing, dst), dist.P2POp(dist.irecv, incoming, src)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CourseFolder:
    copy_first_phases(ROOT, tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("phase1_data_parallel", "solutions"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_phase1.py").write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    return folders.find()


@pytest.fixture
def two_phases(here: CourseFolder) -> CourseFolder:
    """With the templates of the second phase, and a suite that only counts as one."""
    copy_first_phases(ROOT, here.root, count=2)
    both = folders.find()
    folder = both.course.phases[1].folder
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / folder, both.root / folder, ignore=ignored)
    shutil.copy(both.root / both.suite(both.course.phases[0]), both.root / "tests/test_phase2.py")
    return both


def write_exchange(here: CourseFolder, body: str) -> None:
    """Put a body in place of the TODO, or of the body before it."""
    lines = (ROOT / FILE).read_text().splitlines(keepends=True)
    (place,) = (k for k, line in enumerate(lines) if line.startswith(TODO))
    lines[place] = body
    (here.root / FILE).write_text("".join(lines))


def has_come_out(here: CourseFolder, **outcomes: str) -> None:
    """Pretend that tasks, as t1_4, were graded."""
    named = {name[1:].replace("_", "."): outcome for name, outcome in outcomes.items()}
    records = {
        id: state.Record(outcome, source.digest(here, here.task(id)))
        for id, outcome in named.items()
    }
    state.remember(here, records)


# --- where one stands ----------------------------------------------------------------------------


def test_alone_it_says_how_far_one_is_and_what_to_run(
    here: CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    has_come_out(here, t1_1="passed", t1_2="failed")
    assert distlab() == 0
    printed = capsys.readouterr().out
    assert "Phase 1  Data parallelism" in printed
    first, second = here.course.tasks[:2]
    phase = here.course.phases[0]
    counts = f"1/{len(phase.tasks)} tasks  {first.points}/{phase.points} points"
    assert counts in printed
    assert f"Next: 1.2 Load a share of every batch ({second.minutes} minutes)" in printed
    assert "distlab check 1.2" in printed


def test_status_knows_what_was_edited_since(
    here: CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    has_come_out(here, t1_4="passed", t1_5="hang")
    write_exchange(here, RIGHT)
    assert distlab("status") == 0
    lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert ["✔", "1.4", "exchange", "passed, edited since"] in lines
    assert ["✘", "1.5", "broadcast", "hang"] in lines
    assert ["·", "1.6", "all_reduce_naive"] in lines


@pytest.mark.parametrize(
    ("id", "helper"), [("1.8", "fit_alpha_beta"), ("1.10", "average_gradients_flat")]
)
def test_whatever_a_task_is_graded_by_counts_as_edited(
    here: CourseFolder, id: str, helper: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = here.task(id)
    state.remember(here, {id: state.Record("passed", source.digest(here, task))})
    path = here.root / task.template
    text = path.read_text()
    path.write_text(text.replace(f'"Task {id}: {helper}, ', f'"Task {id}: my {helper}, '))
    assert distlab("status") == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if f" {id} " in line)
    assert line.endswith("passed, edited since")


HELPER = "\n\ndef _helper(x):\n    # doubles\n    return x * {}\n"


def is_edited_by(here: CourseFolder, id: str, change: Callable[[str], str]) -> bool:
    """Whether a change of a file that ends in a helper counts as an edit of a task in it."""
    task = here.task(id)
    path = here.root / task.template
    before = path.read_text() + HELPER.format(2)
    path.write_text(before)
    state.remember(here, {id: state.Record("failed", source.digest(here, task))})
    path.write_text(change(before))
    return state.load(here).is_edited(here, task)


def test_a_change_of_a_helper_counts_as_edited(here: CourseFolder) -> None:
    assert is_edited_by(here, "1.4", lambda text: text.replace("x * 2", "x * 3"))
    assert is_edited_by(here, "1.4", lambda text: f"{text}\nNEW = 1\n")


def test_what_is_of_another_task_or_means_nothing_does_not(here: CourseFolder) -> None:
    def broadcast(text: str) -> str:
        return text.replace('"Task 1.5: broadcast, ', '"Task 1.5: my broadcast, ')

    assert is_edited_by(here, "1.5", broadcast)
    write_exchange(here, RIGHT)
    assert not is_edited_by(here, "1.4", broadcast)
    assert not is_edited_by(here, "1.4", lambda text: text.replace("# doubles", "# doubles it"))


def test_it_works_below_the_course_s_folder_and_says_where_it_does_not(
    here: CourseFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.chdir(here.root / "phase1_data_parallel")
    assert distlab("status") == 0
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    capsys.readouterr()
    assert distlab("status") == 2
    printed = capsys.readouterr().err
    assert "is not in the course's folder" in printed
    assert printed.endswith(f"; cd {ROOT}\n")


def test_status_imports_neither_torch_nor_pytest(here: CourseFolder) -> None:
    code = (
        "import sys, distlab.cli\n"
        "try: distlab.cli.main(['status'])\n"
        "finally: print({'torch', 'numpy', 'pytest', 'watchfiles'} & set(sys.modules))"
    )
    environment = grading.environment()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout.decode().splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"tasks": 3, "hints": []}',
        '{"tasks": {"1.4": {"outcome": "splendid"}, "1.5": 7}, "hints": {"1.4": 9, "1.5": true}}',
    ],
)
def test_a_state_that_makes_no_sense_is_forgotten(here: CourseFolder, text: str) -> None:
    here.private.mkdir()
    (here.private / state.FILE).write_text(text)
    progress = state.load(here)
    assert (progress.records, progress.hints) == ({}, {})


def test_a_pipe_in_place_of_the_state_is_forgotten(here: CourseFolder) -> None:
    here.private.mkdir()
    os.mkfifo(here.private / state.FILE)
    assert state.load(here).records == {}


def test_an_encoding_that_is_none_is_one_line(
    here: CourseFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    (here.root / FILE).write_text(f"# -*- coding: rot13 -*-\n{(here.root / FILE).read_text()}")
    for command in (["diff", "1.4", "--spoil"], ["reset", "1.4", "--yes"]):
        assert distlab(*command) == 2
        printed = capfd.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1), printed


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("check 1.55", "there is no task '1.55'. Did you mean '1.5'?"),
        ("hint broadcst", "there is no task 'broadcst'. Did you mean 'broadcast'?"),
        (
            "check 2.1",
            "no task '2.1': phase 2 is not in this course's folder yet; there are 1.1 to "
            f"{COURSE.phases[0].tasks[-1].id}",
        ),
        ("diff", "no task has passed yet: name one, with --spoil"),
        ("diff 99", "there is no task '99'. There are: 1.1, 1.2, "),
        ("diff 1.4", "1.4 has not passed yet: distlab check 1.4, or --spoil shows it anyway"),
        ("reset 1.4", "cannot ask for confirmation here: use distlab reset 1.4 --yes"),
        ("hint 1.4 --level 4", "--level 4: a task has hints 1 to 3"),
        ("grade --phase 9", "there is no phase '9'. There are: 1"),
        ("grade --impl nowhere", "--impl nowhere: no such folder; use template, solution or a "),
        ("grade --report xml=a", "with one of json, junit, gradescope, markdown"),
        ("grade --backend x", "'auto', 'sim', 'gloo', 'nccl'"),
        (
            "trace 1.13",
            "there is no picture of 1.13; distlab trace draws 1.3, 1.4, 1.5, 1.6, 1.7, 1.9",
        ),
        ("grade --world-timeout 0", "--world-timeout 0: must be a number of seconds above 0"),
        ("check 1.4 --world-timeout -1", "--world-timeout -1: must be a number of seconds above 0"),
        (
            "check 1.4 --world-timeout nan",
            "--world-timeout nan: must be a number of seconds above 0",
        ),
        (
            "watch 1.4 --world-timeout inf",
            "--world-timeout inf: must be a number of seconds above 0",
        ),
        ("trace 1.4 --ranks 9", "--ranks 9: the simulated laptop has 2 to 8"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    here: CourseFolder, arguments: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert distlab(*arguments.split()) == 2
    printed = capfd.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert line in printed.err


# --- accidents -----------------------------------------------------------------------------------


def started(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "distlab", *arguments]
    return subprocess.run(
        *(command,),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        env=grading.environment(),
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("arguments", ["", "status", "hint 1.4", "--help", "--version"])
def test_a_reader_that_has_gone_is_no_news(here: CourseFolder, arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = started(*arguments.split(), stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "closed", "code"),
    [
        ("status", ">&-", 0),
        ("status", "<&- >&- 2>&-", 0),
        ("hint 1.4", ">&-", 0),
        ("diff 1.4", "2>&-", 2),
        ("reset 1.4", "<&-", 2),
        ("trace 1.6 --impl solution", ">&- 2>&-", 0),
    ],
)
def test_closed_streams_leave_the_exit_code_true(
    here: CourseFolder, arguments: str, closed: str, code: int
) -> None:
    command = f"exec {sys.executable} -m distlab {arguments} {closed}"
    done = subprocess.run(
        ["sh", "-c", command], env=grading.environment(), capture_output=True, text=True
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == (1 if code and "2>" not in closed else 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full device")
def test_output_that_finds_no_place_is_an_error_in_one_line(here: CourseFolder) -> None:
    with open("/dev/full", "w") as full:
        done = started("status", stdout=full)
    assert done.returncode == 1
    assert done.stderr == "distlab: standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", "status"),
        ("distlab.learner.folder", "status"),
        ("inside exec", "status"),
        ("tomllib" if sys.version_info >= (3, 11) else "tomli", "status"),
        ("torch", "trace 1.4 --impl solution"),
        ("numpy", "trace 1.4 --impl solution"),
        ("matplotlib.figure", "trace 1.4 --impl solution"),
    ],
)
def test_ctrl_c_while_a_module_loads_is_one_line(
    here: CourseFolder, module: str, arguments: str
) -> None:
    code = f"""
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
import distlab.cli
if {module!r} == "inside exec":  # as dataclasses do when a module is loaded
    import distlab.cli.app
    distlab.cli.app.run = lambda _: exec("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
distlab.cli.main({arguments.split()!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=grading.environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n"), done.stderr


def test_a_private_folder_that_is_a_file_is_named_and_nothing_else_fails(
    here: CourseFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here.private.write_text("not a folder")
    problem = f"your progress cannot be kept in {here.private}: File exists\n"
    monkeypatch.setattr(grading, "captured_in", lambda _: saying(0, ("1.4", "passed", 5)))
    for arguments, begin, error in (
        ("status", "Phase 1", ""),
        ("hint 1.4", "1.4 Exchange without", problem),
        ("check 1.4", "✔ 1.4 exchange: passed", problem),
    ):
        assert distlab(*arguments.split()) == 0
        printed = capsys.readouterr()
        assert printed.out.startswith(begin)
        assert printed.err == error
    assert here.private.read_text() == "not a folder"


def test_reset_does_nothing_where_no_copy_can_be_kept(
    here: CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    git(here, "init", "-q")
    git(here, "add", str(FILE))
    git(here, "commit", "-qm", "as the course gives it")
    write_exchange(here, WRONG)
    here.private.write_text("not a folder")
    assert distlab("reset", "1.4", "--yes") == 1
    assert capsys.readouterr() == (
        "",
        f"nothing was changed: {here.private}/reset/1.4: Not a directory\n",
    )
    assert WRONG in (here.root / FILE).read_text()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_course_that_cannot_be_written_is_still_graded(
    here: CourseFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    def fail(path: Path, *_: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("distlab.util.files.write_whole", fail)
    monkeypatch.setattr(grading, "captured_in", lambda _: saying(1, ("1.4", "failed", 0)))
    assert distlab("check", "1.4") == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("✘ 1.4 exchange: failed")
    assert printed.err.endswith(
        f"progress cannot be kept in {here.private}: {os.strerror(number)}\n"
    )
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("options", [[], ["-v"], ["--verbose"]])
def test_a_check_gives_messages_in_full_if_asked(
    here: CourseFolder, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    asked: list[str] = []
    failed = saying(1, ("1.4", "failed", 0))

    def run(arguments: list[str]) -> tuple[int, str]:
        asked.extend(arguments)
        return failed(arguments)

    monkeypatch.setattr(grading, "captured_in", lambda _: run)
    assert distlab("check", "1.4", *options) == 1
    assert ("-v" in asked) == bool(options)


def test_a_picture_without_a_place_is_an_error_in_one_line(
    here: CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (here.root / "out").write_text("not a folder")
    assert distlab("trace", "1.4", "--impl", "solution") == 1
    printed = capsys.readouterr()
    assert printed.err == f"the picture {here.root}/out/trace-1.4.png: File exists\n"


def test_a_folder_that_has_been_removed_says_where_to_go(
    here: CourseFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = here.root / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert distlab("status") == 2
    assert capsys.readouterr().err == f"this folder has been removed: cd {ROOT}\n"
    monkeypatch.chdir(here.root)  # pytest asks where it is


# --- hints, diff, reset --------------------------------------------------------------------------


def test_a_hint_is_of_the_next_task_by_default(
    here: CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    state.remember(here, {"1.1": state.Record("passed")})
    assert distlab("hint") == 0
    assert capsys.readouterr().out.startswith("1.2 ")


def test_each_hint_says_more_and_the_last_says_so(
    here: CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    titles = []
    for _ in range(4):
        assert distlab("hint", "1.5") == 0
        printed = capsys.readouterr().out
        titles.append(printed.splitlines()[1])
    assert titles == ["Hint 1: a question", "Hint 2: the idea"] + 2 * ["Hint 3: names"]
    assert "That was the last hint. Read on in phase1_data_parallel/guidelines.md#15-b" in printed
    assert distlab("hint", "broadcast", "--level", "1") == 0
    assert "how many ranks have the data, and" in capsys.readouterr().out


@pytest.mark.parametrize("outcome", ["hang", "failed"])
def test_the_first_hint_is_the_question_whatever_came_out(here: CourseFolder, outcome: str) -> None:
    has_come_out(here, t1_4=outcome, t1_11=outcome)
    for task in (here.task("1.4"), here.task("1.11")):
        levels = [hints.take(here, task, state.load(here)).level for _ in range(4)]
        assert levels == [1, 2, 3, 3]


def test_every_task_has_its_hints() -> None:
    course = folders.find(ROOT)
    assert all(len(hints.hints(course, task)) == 3 for task in course.course.tasks)


def test_diff_compares_the_functions_of_a_task_and_nothing_else(
    here: CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    write_exchange(here, RIGHT)
    has_come_out(here, t1_4="passed")
    assert distlab("diff", "1.4") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("--- yours: exchange\n+++ solution: exchange\n")
    assert "-    for work in dist.batch_isend_irecv(both):" not in printed, "both have it"
    assert "def broadcast" not in printed
    shutil.copy(ROOT / FILE, here.root / FILE)
    templates.keep(here)
    assert distlab("diff", "1.8", "--spoil") == 0
    printed = capsys.readouterr().out
    assert "+++ solution: measure_all_reduce" in printed
    assert "+++ solution: fit_alpha_beta" in printed


def test_diff_shows_the_helpers_that_hold_the_answer_and_no_docstrings(
    here: CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for id, shown, not_shown in (
        ("1.2", "_equal_share", "shard_indices"),
        ("1.8", "_slowest_rank_s", "_exchange_in_ring"),  # given: both have it
        ("1.9", "_broadcast_all", "broadcast"),
        ("1.10", "_gradient", "broadcast"),
        ("1.13", "Trainer._finish_epoch", "Trainer.__init__"),
    ):
        assert distlab("diff", id, "--spoil") == 0
        printed = capsys.readouterr().out
        assert f"+++ solution: {shown}\n" in printed
        assert f"solution: {not_shown}\n" not in printed
        assert '"""' not in printed


def test_diff_is_of_the_last_that_has_passed(
    here: CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for id, outcome in (("1.5", "passed"), ("1.4", "passed"), ("1.6", "failed")):
        state.remember(here, {id: state.Record(outcome)})
    assert distlab("diff") == 0
    assert "+++ solution: exchange\n" in capsys.readouterr().out
    state.remember(here, {"1.5": state.Record("passed")})
    assert distlab("diff") == 0
    assert "+++ solution: broadcast\n" in capsys.readouterr().out


def test_diff_says_when_there_is_none(
    here: CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    templates.keep(here)
    shutil.copy(here.root / here.task("1.4").solution, here.root / FILE)
    assert distlab("diff", "1.4", "--spoil") == 0
    assert capsys.readouterr().out == "exchange is the same as the solution's.\n"


def git(here: CourseFolder, *arguments: str) -> None:
    settings = ["-c", "user.name=learner", "-c", "user.email=learner@example.org"]
    subprocess.run(["git", *settings, *arguments], cwd=here.root, check=True, capture_output=True)


@pytest.fixture(params=["git", "copy"])
def kept(request: pytest.FixtureRequest, here: CourseFolder) -> CourseFolder:
    """The course with its templates in git, or in .distlab/ only."""
    if request.param == "copy":
        templates.keep(here)
        return here
    git(here, "init", "-q")
    git(here, "add", str(FILE))
    git(here, "commit", "-qm", "as the course gives it")
    write_exchange(here, WRONG)
    git(here, "commit", "-qam", "learners commit their own code too")
    return here


@pytest.mark.parametrize("body", [WRONG, "    return (\n"], ids=["wrong", "does not parse"])
def test_reset_puts_one_function_back_and_keeps_the_old_text(
    kept: CourseFolder, body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_exchange(kept, body)
    has_come_out(kept, t1_4="failed")
    mine = (kept.root / FILE).read_text().replace("About 20 lines.", "About 20 lines?")
    (kept.root / FILE).write_text(mine)
    assert distlab("reset", "1.4", "--yes") == 0
    now = (kept.root / FILE).read_text()
    assert now == (ROOT / FILE).read_text().replace("About 20 lines.", "About 20 lines?")
    (old,) = (kept.private / "reset" / "1.4").iterdir()
    assert old.read_text() == mine
    assert str(old.relative_to(kept.root)) in capsys.readouterr().out
    assert state.load(kept).outcome(kept.task("1.4")) == ""


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
def test_reset_leaves_all_else_byte_for_byte(kept: CourseFolder, end: bytes) -> None:
    strange = b"\x0c# a page of its own \xe2\x80\xa8\n"
    after = (strange + (ROOT / FILE).read_bytes()).replace(b"\n", end)
    write_exchange(kept, WRONG)
    before = (strange + (kept.root / FILE).read_bytes()).replace(b"\n", end)
    (kept.root / FILE).write_bytes(before)
    (kept.root / FILE).chmod(0o640)
    assert distlab("reset", "1.4", "--yes") == 0
    assert (kept.root / FILE).read_bytes() == after
    assert (kept.root / FILE).stat().st_mode & 0o777 == 0o640
    (old,) = (kept.private / "reset" / "1.4").iterdir()
    assert old.read_bytes() == before


def test_a_reset_that_cannot_write_leaves_the_file_whole(
    here: CourseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates.keep(here)
    write_exchange(here, WRONG)
    before = (here.root / FILE).read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(WriteError, match=r"nothing was changed: .* disk full"):
        resetting.reset(here, here.task("1.4"))
    assert (here.root / FILE).read_bytes() == before
    assert [path.name for path in (here.root / FILE).parent.glob(".*")] == []


def test_reset_knows_the_template_from_a_file_in_which_a_part_of_the_task_is_written(
    kept: CourseFolder,
) -> None:
    task, path = kept.task("1.8"), kept.root / FILE
    untouched = path.read_text()
    path.write_text(untouched.replace('"Task 1.8: fit_alpha_beta, ', '"written, '))
    if (kept.root / ".git").is_dir():
        git(kept, "commit", "-qam", "a part")
    resetting.reset(kept, task)
    assert path.read_text() == untouched


def test_reset_says_when_it_cannot(here: CourseFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert distlab("reset", "1.4", "--yes") == 2
    assert "neither git nor .distlab/templates has" in capsys.readouterr().err
    templates.keep(here)
    (here.root / FILE).write_text("x = 1\n")
    assert distlab("reset", "1.4", "--yes") == 2
    assert "has no exchange to reset; git checkout -- " in capsys.readouterr().err
    assert (here.root / FILE).read_text() == "x = 1\n"


PASTED = "sending = dist.isend(outgoing, dst)\ndist.recv(incoming, src)\nsending.wait()\n"
PASTE = (ROOT / FILE).read_text().partition(TODO)[0].count("\n") + 1  # where a body begins
SECOND = (
    "\n\ndef exchange(outgoing, dst, incoming, src, group=None):\n    incoming.copy_(outgoing)\n"
)


@pytest.mark.parametrize(
    ("body", "end", "removed"),
    [
        (PASTED, "", f"lines {PASTE} to {PASTE + 2} below exchange, which are not part of it"),
        (PASTED + "return\n", "", f"lines {PASTE} to {PASTE + 3} below exchange"),
        ("if dst:\n" + PASTED, "", f"lines {PASTE} to {PASTE + 3} below exchange"),
        (WRONG, SECOND, "another definition of exchange in lines "),
        ("    return (\n", SECOND, "another definition of exchange in lines "),
        (WRONG, "\n\nCHUNK = 4\n", ""),
        ("    # to be done\n\n    # soon\n", "", ""),
        ("\tincoming.copy_(outgoing)\n", "\n\nCHUNK = 4\n", ""),
        ("    def broadcast(x):\n        return x\n\n    broadcast(incoming)\n", "", ""),
    ],
)
def test_reset_puts_back_whatever_stands_where_the_function_was(
    here: CourseFolder,
    body: str,
    end: str,
    removed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    templates.keep(here)
    write_exchange(here, body)
    with (here.root / FILE).open("a") as file:
        file.write(end)
    assert distlab("reset", "1.4", "--yes") == 0
    kept = "" if end == SECOND else end
    assert (here.root / FILE).read_text() == (ROOT / FILE).read_text() + kept
    assert f"Also removed: {removed}" in capsys.readouterr().out or not removed


def test_reset_takes_decorators_along(here: CourseFolder) -> None:
    templates.keep(here)
    for body in (WRONG, "    return (\n"):
        write_exchange(here, body)
        text = (here.root / FILE).read_text()
        (here.root / FILE).write_text(
            text.replace("def exchange(", "@torch.no_grad()\ndef exchange(")
        )
        assert distlab("reset", "1.4", "--yes") == 0
        assert (here.root / FILE).read_text() == (ROOT / FILE).read_text()


@pytest.mark.parametrize("body", ["\t\treturn []\n", "\t\treturn (\n"])
def test_reset_puts_a_method_where_its_class_has_tabs(here: CourseFolder, body: str) -> None:
    templates.keep(here)
    path = here.root / here.task("1.13").template
    path.write_text(f"class Trainer:\n\tdef fit(self):\n{body}\n\tdef other(self):\n\t\tpass\n")
    assert distlab("reset", "1.13", "--yes") == 0
    text = path.read_text()
    compile(text, "", "exec")
    assert "\n\tdef other(self):\n\t\tpass\n" in text
    assert set(source.to_write(here.task("1.13"), text)) == {"Trainer.fit"}


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("\n\ndef helper(:\n", "would not parse afterwards: line "),
        ("\n\nreturn\n", "would not parse afterwards: line "),
        ("\n\nexchange = print\n", "gives exchange another meaning in line "),
        ("\n\nif True:\n    def exchange(): pass\n", "gives exchange another meaning in line "),
        ("\n# \xff\n", "Python cannot read phase1_data_parallel/template_collectives.py: "),
    ],
)
def test_reset_that_would_not_be_effective_changes_nothing(
    here: CourseFolder, end: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    templates.keep(here)
    write_exchange(here, WRONG)
    before = (here.root / FILE).read_bytes() + end.encode("latin-1")
    (here.root / FILE).write_bytes(before)
    assert distlab("reset", "1.4", "--yes") == 2
    printed = capsys.readouterr().err
    assert printed.startswith("nothing was changed: ")
    assert reason in printed
    assert printed.count("\n") == 1
    assert (here.root / FILE).read_bytes() == before


def test_a_file_too_deep_to_be_written_out_has_a_digest(here: CourseFolder) -> None:
    path = here.root / FILE
    path.write_text(f"{path.read_text()}\nTERMS = {' + '.join(['1'] * 2_500)}\n")
    before = source.digest(here, here.task("1.4"))
    path.write_text(path.read_text().replace("1 + 1", "1 + 2", 1))
    assert source.digest(here, here.task("1.4")) not in ("", before)


@pytest.mark.parametrize(
    ("start", "encoding"),
    [("# -*- coding: latin-1 -*-\n# Jos\xe9\n", "latin-1"), ("# Jos\xe9\n", "utf-8-sig")],
    ids=["latin-1", "BOM"],
)
def test_a_file_is_read_and_written_in_its_own_encoding(
    here: CourseFolder, start: str, encoding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    templates.keep(here)
    task, path = here.task("1.4"), here.root / FILE
    write_exchange(here, WRONG)
    as_given = source.digest(here, task)
    text = (start + path.read_text()).replace("α", "a").replace("β", "b").replace("·", "*")
    path.write_bytes(text.encode(encoding, errors="backslashreplace"))
    assert source.digest(here, task) not in ("", as_given)
    assert distlab("diff", "1.4", "--spoil") == 0
    assert "-    incoming.copy_(outgoing)" in capsys.readouterr().out
    assert distlab("reset", "1.4", "--yes") == 0
    after = path.read_bytes()
    assert after.startswith(start.encode(encoding))
    assert set(source.to_write(task, source.read(path))) == {"exchange"}
    compile(after, "", "exec")


def test_reset_asks_first(
    here: CourseFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    templates.keep(here)
    write_exchange(here, WRONG)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    questions: list[str] = []
    monkeypatch.setattr("typer.confirm", questions.append)
    assert distlab("reset", "1.4") == 1
    assert questions == [f"Replace exchange in {FILE} with the template?"]
    assert capsys.readouterr().out == "Nothing was changed.\n"
    assert WRONG in (here.root / FILE).read_text()


# --- grading -------------------------------------------------------------------------------------


def test_the_options_are_those_of_the_grader() -> None:
    assert tuple(reports.FORMATS) == grading.REPORTS
    assert get_args(learn.Backend) == plugin.BACKENDS


def test_the_outcomes_are_those_of_the_grader() -> None:
    assert {outcome.value for outcome in Outcome} == {course.PASSED, *course.OUTCOMES}


def report_asked_for(arguments: Sequence[str]) -> Path:
    return Path(arguments[-1].removeprefix("json="))


def saying(
    code: int,
    *tasks: tuple[str, str, int],
    text: str = "",
    advice: Sequence[str] = (),
    **more: object,
) -> grading.Run:
    """What runs no pytest, and reports (id, outcome, points of 5) and ``more`` of each task."""
    keys = ("id", "outcome", "points")
    entries = [dict(zip(keys, task, strict=True)) for task in tasks]
    entries = [{**entry, "max_points": 5, "seconds": 0.1, **more} for entry in entries]

    def run(arguments: list[str]) -> tuple[int, str]:
        if tasks:
            path = report_asked_for(arguments)
            path.write_text(json.dumps({"tasks": entries, "advice": advice}))
        return code, text

    return run


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (saying(0, ("1.4", "passed", 5)), 0),
        (saying(1, ("1.4", "passed", 5), ("1.5", "todo", 0)), 1),
        (saying(0, ("1.4", "passed", 0)), 1),
        (saying(4), 2),
        (saying(0), 3),
        (saying(1), 3),
        (saying(1, ("1.4", "grader error", 0)), 3),
        (saying(2, ("1.4", "passed", 5)), 3),
        (saying(-9, ("1.4", "passed", 5)), 3),
        (saying(5, ("1.4", "grader error", 0)), 4),
    ],
)
def test_only_a_complete_report_of_full_marks_is_a_success(
    here: CourseFolder, run: grading.Run, code: int
) -> None:
    assert grading.grade(here, [], run).code == code


def test_a_report_of_the_learner_s_is_neither_read_nor_removed(here: CourseFolder) -> None:
    report = here.root / "a.json"
    asked = ["--report", f"json={report}"]
    saying(0, ("1.4", "passed", 5))(asked)
    before = report.read_bytes()
    assert grading.grade(here, asked, saying(0)).code == grading.GRADER_FAILED
    assert report.read_bytes() == before


def test_a_report_may_go_to_a_device_but_not_to_a_folder(
    here: CourseFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    found = grading.find_reports(["json=/dev/stdout", "json=new/a.json"])
    assert found[1::2] == ["json=/dev/stdout", f"json={here.root / 'new/a.json'}"]
    assert list((here.root / "new").iterdir()) == []
    for path, reason in (("solutions", "is a folder"), ("course.toml/a", "cannot be written")):
        assert distlab("grade", "--report", f"json={path}") == 2
        printed = capfd.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert reason in printed.err


def test_what_cannot_be_remembered_is_graded_all_the_same(here: CourseFolder) -> None:
    shutil.rmtree(here.private, ignore_errors=True)
    here.private.write_text("a file")
    graded = grading.grade(here, [], saying(1, ("1.4", "passed", 5)))
    progress = grading.remember(here, graded)
    assert progress.outcome(here.task("1.4")) == "passed"
    assert progress.problem.startswith(f"your progress cannot be kept in {here.private}: ")


@pytest.mark.slow
def test_what_pytest_says_of_the_templates_counts_in_status_too(
    fresh_pytest: FreshPytest, here: CourseFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    write_exchange(here, RIGHT)
    for extra in ([], ["--impl", "solution", "-k", "1.5"], ["-k", "1.4", "--collect-only"]):
        fresh_pytest("tests/test_phase1.py", "-q", *extra, folder=here.root)
    assert distlab("status") == 0
    printed = capfd.readouterr().out
    assert re.search(r"✔ 1.4 +exchange", printed), printed
    assert "edited since" not in printed
    assert not re.search(r"✔ 1.5", printed)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_first_hour(here: CourseFolder, capfd: pytest.CaptureFixture[str]) -> None:
    write_exchange(here, DEADLOCK)
    assert distlab("check", "1.4") == 1
    printed = capfd.readouterr().out
    points = here.course.task("1.4").points
    assert printed.startswith(f"✘ 1.4 exchange: hang (0/{points} points, ")
    assert "Task 1.4: deadlock" in printed
    assert "See who waits for whom: distlab trace 1.4 --ranks 2" in printed
    assert "template_collectives.py:" in printed
    assert "Stuck? distlab hint 1.4" in printed
    assert distlab("trace", "1.4") == 1
    assert "deadlock" in capfd.readouterr().out
    write_exchange(here, RIGHT)
    assert distlab("watch", "1.4") == 0, "without a terminal, one check"
    printed = capfd.readouterr().out
    assert printed.startswith(f"✔ 1.4 exchange: passed ({points}/{points} points, ")
    assert "distlab diff 1.4" in printed
    assert "Next: 1.5" in printed
    assert "\x1b" not in printed


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_grade_runs_everything_anew_and_writes_reports(
    here: CourseFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    has_come_out(here, t1_4="passed", t1_5="passed")
    assert distlab("grade", "--report", "json=a.json", "--report", "markdown=b.md") == 3
    assert "the suite has no test for it" in capfd.readouterr().out
    outcomes = {
        task["id"]: task["outcome"] for task in json.loads(Path("a.json").read_text())["tasks"]
    }
    assert (outcomes["1.4"], outcomes["1.5"]) == ("todo", "grader error")
    assert Path("b.md").stat().st_size > 0
    assert state.load(here).outcome(here.task("1.4")) == "todo"


def test_trace_draws_what_the_function_sends(
    here: CourseFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    assert distlab("trace", "1.6", "--impl", "solution", "--ranks", "2") == 0
    assert capfd.readouterr().out.endswith("out/trace-1.6.png: who did what when\n")
    assert (here.root / "out/trace-1.6.png").read_bytes().startswith(b"\x89PNG")


def test_trace_says_what_is_not_written(
    here: CourseFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    assert distlab("trace", "1.6") == 1
    assert (
        capfd.readouterr().out == f"1.6 all_reduce_naive is not written yet: write it in {FILE}\n"
    )
    text = (here.root / FILE).read_text()
    mark = 'raise NotImplementedError(\n        "Task 1.6'
    assert mark in text
    (here.root / FILE).write_text(
        text.replace(mark, "broadcast(x)\n    " + mark.replace("1.6", ""))
    )
    assert distlab("trace", "1.6") == 1
    assert capfd.readouterr().out == f"1.5 broadcast is not written yet: write it in {FILE}\n"


def test_trace_shows_the_learner_s_lines_alone(
    here: CourseFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    write_exchange(here, "    dist.send(outgoing, 99)\n")
    assert distlab("trace", "1.4") == 1
    printed = capfd.readouterr().out
    assert "template_collectives.py" in printed
    assert "/distlab/" not in printed
    assert "trace_bodies.py" not in printed


def test_trace_runs_exchange_in_the_order_in_which_it_is_judged(
    here: CourseFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    write_exchange(here, UNBATCHED)
    assert distlab("trace", "1.4", "--ranks", "2") == 1
    assert "rank 0's recv from rank 1 waits behind its isend to rank 1" in (
        " ".join(capfd.readouterr().out.split()).replace("Rank", "rank")
    )


def test_trace_says_so_where_it_cannot_show_what_hung(
    here: CourseFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    write_exchange(here, RIGHT)
    has_come_out(here, t1_4="hang")
    assert distlab("trace", "1.4") == 0
    assert "the tests hang in another case" in capfd.readouterr().out


def test_whether_a_task_can_be_drawn_is_told_without_torch() -> None:
    code = (
        "import sys\nfrom distlab.learner.trace_programs import PROGRAMS\n"
        "print('1.4' in PROGRAMS, '1.13' in PROGRAMS, 'torch' in sys.modules)"
    )
    environment = grading.environment()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout.decode() == "True False False\n"
    assert (
        trace_programs.PROGRAMS.keys()
        == trace_bodies.BODIES.keys()
        <= {task.id for task in COURSE.tasks}
    )


def test_several_tasks_are_checked_one_by_one(
    here: CourseFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = {"1.4": (1, "failed", 0), "1.5": (0, "passed", 5), "1.6": (3, "grader error", 0)}

    class Fake:
        def __init__(self, _: CourseFolder) -> None:
            pass

        def __call__(self, arguments: list[str]) -> tuple[int, str]:
            id = arguments[arguments.index("-k") + 1]
            code, outcome, points = codes[id]
            return saying(code, (id, outcome, points))(arguments)

        def close(self) -> None:
            pass

    monkeypatch.setattr("distlab.learner.grader_server.WarmGrader", Fake)
    assert distlab("check", "1.5", "1.4", "broadcast") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(("✔", "✘"))] == [
        "✔ 1.5 broadcast: passed (5/5 points, 0.1 s)",
        "✘ 1.4 exchange: failed (0/5 points, 0.1 s)",
    ]
    assert distlab("check", "1.4", "1.6", "1.5") == 3


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_several_tasks_share_one_process(
    here: CourseFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    write_exchange(here, RIGHT)
    before = psutil.Process().children()
    assert distlab("check", "1.4", "1.5") == grading.NOTHING_RAN, "the suite has no 1.5"
    assert "✔ 1.4 exchange: passed" in capfd.readouterr().out
    assert psutil.Process().children() == before


BROADCAST_MISSING = {"task": "1.5", "function": "broadcast"}


def test_an_earlier_task_that_is_missing_is_what_is_to_be_written(
    here: CourseFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saying(1, ("1.6", "todo", 0), write_next=BROADCAST_MISSING)
    monkeypatch.setattr(grading, "captured_in", lambda _: run)
    assert distlab("check", "1.6") == 1
    assert capsys.readouterr().out.splitlines() == [
        "· 1.6 all_reduce_naive: needs 1.5 broadcast, which is still to be written",
        "Write broadcast in phase1_data_parallel/template_collectives.py.",
        "Read  phase1_data_parallel/guidelines.md#15-broadcast-along-a-tree",
        "Run:  distlab check 1.5   or: distlab watch 1.5",
        "Or take 1.5 from the solutions: distlab check --lend 1.6",
    ]
    assert distlab("check", "--lend", "1.6") == 1, "it was lent, and yet the report says so"
    assert capsys.readouterr().out.splitlines()[-1] == (
        "Run:  distlab check --lend 1.5   or: distlab watch --lend 1.5"
    )


@pytest.mark.parametrize("id", ["1.3", "1.6"])
def test_nothing_is_offered_that_cannot_be_lent(here: CourseFolder, id: str) -> None:
    """1.3 does not build on 1.5; and a student's copy has no solutions."""
    if id == "1.6":
        shutil.rmtree(here.root / "solutions")
    graded = grading.grade(here, [], saying(1, (id, "todo", 0), write_next=BROADCAST_MISSING))
    assert not any("--lend" in line for line in status.explanation(here, here.task(id), graded))


def test_commands_that_are_printed_lend_where_the_one_that_was_typed_did(
    here: CourseFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_come_out(here, t1_4="failed")
    failed, passed = saying(1, ("1.7", "failed", 0)), saying(0, ("1.7", "passed", 5))
    monkeypatch.setattr(grading, "captured_in", lambda _: failed)
    assert distlab("check", "--lend", "1.7") == 1
    printed = capsys.readouterr().out
    assert printed.endswith("Stuck? distlab hint 1.7   Again: distlab check --lend 1.7\n")
    assert "Fix 1.4 first: distlab check --lend 1.4\n" in printed
    monkeypatch.setattr(grading, "captured_in", lambda _: passed)
    assert distlab("check", "--lend", "1.7") == 0
    last = "Run:  distlab check --lend 1.8   or: distlab watch --lend 1.8\n"
    assert capsys.readouterr().out.endswith(last)


def test_several_commands_lend_too(
    here: CourseFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saying(0, ("1.4", "passed", 5))
    monkeypatch.setattr(learn, "_grader", lambda *_: nullcontext(run))
    distlab("check", "--lend", "1.4", "1.7")
    last = "Run:  distlab check --lend 1.1   or: distlab watch --lend\n"
    assert capsys.readouterr().out.endswith(last)


def test_all_that_is_missing_and_can_be_lent_is_named(
    here: CourseFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = {"task": "1.4", "function": "exchange"}
    run = saying(1, ("1.8", "todo", 0), write_next=missing)
    monkeypatch.setattr(grading, "captured_in", lambda _: run)
    assert distlab("check", "1.8") == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "Or take 1.4, 1.5 and 1.6 from the solutions: distlab check --lend 1.8"
    )


def test_what_was_skipped_is_called_so_when_it_is_next(here: CourseFolder) -> None:
    ids = [task.id for task in here.course.tasks]
    state.remember(here, {id: state.Record("passed") for id in ids[1:]})
    progress = state.load(here)
    line = next(status.whats_next(here, progress, here.task(ids[-1])))
    assert line == "Next: 1.1 Shard the data set (15 minutes), which has not passed yet"
    assert next(status.whats_next(here, progress)).endswith("(15 minutes)")
    _, lines = session(here, saying(0, (ids[-1], "passed", 5)))
    assert "Next: 1.1 Shard the data set, which has not passed yet (n)" in lines


def test_what_failed_and_was_edited_is_called_so_when_it_is_next(here: CourseFolder) -> None:
    ids = [task.id for task in here.course.tasks]
    state.remember(here, {id: state.Record("passed") for id in ids[1:]})
    state.remember(here, {ids[0]: state.Record("failed", digest="of another file")})
    line = next(status.whats_next(here, state.load(here), here.task(ids[-1])))
    assert line == "Next: 1.1 Shard the data set (15 minutes), edited since it failed"


def test_a_pass_stays_where_only_an_earlier_task_is_missing(here: CourseFolder) -> None:
    """As after ``check --lend 1.6``, which had the earlier task from the solutions."""
    missing = saying(1, ("1.6", "todo", 0), write_next=BROADCAST_MISSING)
    has_come_out(here, t1_6="passed")
    progress = grading.remember(here, grading.grade(here, [], missing))
    assert progress.outcome(here.task("1.6")) == "passed"
    (here.root / FILE).write_text((here.root / FILE).read_text() + "\nEDITED = True\n")
    progress = grading.remember(here, grading.grade(here, [], missing))
    assert progress.outcome(here.task("1.6")) == "todo", "it is no longer what had passed"


@pytest.mark.parametrize(
    "run",
    [saying(1, ("1.6", "failed", 0)), saying(1, ("1.6", "todo", 0))],
)
def test_a_pass_does_not_outlast_a_verdict_on_the_task_itself(
    here: CourseFolder, run: grading.Run
) -> None:
    has_come_out(here, t1_6="passed")
    progress = grading.remember(here, grading.grade(here, [], run))
    assert not progress.has_passed(here.task("1.6"))


def test_a_second_function_that_is_missing_is_named(
    here: CourseFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (here.root / FILE).read_text()
    (here.root / FILE).write_text(text.replace("Task 1.8: measure_all_reduce, ", "written, "))
    missing = {"task": "1.8", "function": "fit_alpha_beta"}
    run = saying(1, ("1.8", "todo", 0), write_next=missing)
    monkeypatch.setattr(grading, "captured_in", lambda _: run)
    assert distlab("check", "1.8") == 1
    printed = capsys.readouterr().out
    assert "· 1.8 measure_all_reduce and 1 more: fit_alpha_beta is not written yet\n" in printed
    assert "Write fit_alpha_beta in " in printed
    assert "Stuck? distlab hint 1.8" in printed


@pytest.mark.parametrize(("function", "named"), [("scale", "LossScaler"), ("step", "X.step")])
def test_a_task_of_several_functions_is_named_as_a_whole_until_some_are_written(
    two_phases: CourseFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    function: str,
    named: str,
) -> None:
    missing = {"task": "2.4", "function": f"LossScaler.{function}"}
    if function == "step":
        path = two_phases.root / two_phases.task("2.4").template
        path.write_text(path.read_text().replace("Task 2.4: LossScaler.scale, ", "written, "))
    run = saying(1, ("2.4", "todo", 0), write_next=missing)
    monkeypatch.setattr(grading, "captured_in", lambda _: run)
    assert distlab("check", "LossScaler") == 1
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("· 2.4 LossScaler: ")
    named = named.replace("X", "LossScaler")
    assert second == f"Write {named} in phase2_advanced/template_mixed_precision.py."


def test_a_task_is_found_by_any_of_its_functions() -> None:
    here = CourseFolder(ROOT, COURSE)
    for name in ("LossScaler", "LossScaler.step", "2.4"):
        assert here.task(name).id == "2.4"
    assert here.task("send_tensors").id == "2.9"


@pytest.mark.parametrize(
    ("id", "kind", "world_size", "line"),
    [
        ("1.4", "deadlock", 2, "See who waits for whom: distlab trace 1.4 --ranks 2"),
        ("1.7", "deadlock", 3, "See who waits for whom: distlab trace 1.7 --ranks 3"),
        ("1.7", "all wait", 8, "See who waits for whom: distlab trace 1.7"),
        ("1.7", "wrong", 3, "See who sends what: distlab trace 1.7 --ranks 3"),
        ("1.7", "wrong", 1, ""),
        ("1.7", "deadlock", 16, ""),
        ("1.7", "endless loop", 3, ""),
        ("1.13", "deadlock", 4, ""),
    ],
)
def test_a_verdict_proposes_the_picture_on_as_many_ranks(
    here: CourseFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    id: str,
    kind: str,
    world_size: int,
    line: str,
) -> None:
    advice = ["Task: deadlock, distlab trace", "  in test_a"]
    run = saying(1, (id, "hang", 0), advice=advice, kind=kind, world_size=world_size)
    monkeypatch.setattr(grading, "captured_in", lambda _: run)
    assert distlab("check", id) == 1
    after_verdict = capsys.readouterr().out.splitlines()[1:-1]
    assert after_verdict == advice + [line] * bool(line)


@pytest.mark.parametrize("command", ["check 1.4", "grade", "watch 1.4"])
def test_the_time_of_a_world_is_the_grader_s_option(
    two_phases: CourseFolder, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    asked: list[str] = []

    def run(arguments: list[str]) -> tuple[int, str]:
        asked.extend(arguments)
        return 5, ""

    for name in ("captured_in", "shown_in"):
        monkeypatch.setattr(grading, name, lambda _: run)
    assert distlab(*command.split(), "--world-timeout", "7.5") == grading.NOTHING_RAN
    assert asked[asked.index("--world-timeout") + 1] == "7.5"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check 1.4", "grade"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_grading_that_was_ended(
    here: CourseFolder, command: str, number: signal.Signals
) -> None:
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux's kernel ends children")
    started = here.root / "started"
    write_exchange(here, f"    open({str(started)!r}, 'w').close()\n    while True: pass\n")
    arguments = [sys.executable, "-m", "distlab", *command.split(), "--world-timeout", "60"]
    with subprocess.Popen(arguments, env=grading.environment(), stdout=subprocess.DEVNULL) as done:
        try:
            wait_until(started.exists)
            family = psutil.Process(done.pid).children(recursive=True)
            assert len(family) >= 3, "pytest, its fork server, a rank"
        finally:
            done.send_signal(number)  # else nothing ends it
        assert done.wait(timeout=20) == (143 if number == signal.SIGTERM else -number)
        assert psutil.wait_procs(family, timeout=10)[1] == []


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- watch ---------------------------------------------------------------------------------------


def session(
    here: CourseFolder, run: grading.Run, *events: str, task: str = "1.4"
) -> tuple[watch.Watch, list[str]]:
    """Let a session read events; every one comes once the last was dealt with."""
    lines: list[str] = []
    coming = iter([*events, watch.QUIT])

    class Coming(Queue[str]):
        def get(self, block: bool = True, timeout: float | None = None) -> str:
            return next(coming)

        def get_nowait(self) -> str:
            return Queue.get(self, block=False)

    watching = watch.Watch(here, here.task(task), run, screen_into(lines))
    watching.run(Coming())
    return watching, lines


def screen_into(lines: list[str], width: int = 200, height: int = 100) -> Screen:
    """A screen whose lines are all kept."""
    return Screen(lines.extend, lambda: None, lambda: (width, height))


def test_n_goes_on_only_when_the_task_has_passed(here: CourseFolder) -> None:
    watching, lines = session(here, saying(1, ("1.4", "failed", 0)), "n")
    assert watching.task.id == "1.4"
    assert lines[-3] == "1.4 has not passed yet; h shows a hint"
    watching, lines = session(here, saying(0, ("1.4", "passed", 5)), "n")
    assert watching.task.id == "1.5", "the one after it, though 1.1 is open too"


def test_the_menu_offers_the_keys_that_do_something(here: CourseFolder) -> None:
    end = "c check all  q quit    (grades on every save)"
    _, lines = session(here, saying(1, ("1.4", "hang", 0)), "h", "d")
    assert [line for line in lines if "quit" in line] == 3 * [f"h hint  {end}"], "n, d do nothing"
    _, lines = session(here, saying(0, ("1.4", "passed", 5)))
    assert lines[-1] == f"n next  h hint  d diff  {end}"


def test_what_is_next_is_what_the_command_beside_it_watches(here: CourseFolder) -> None:
    progress, tasks = state.load(here), here.course.tasks
    first = list(status.whats_next(here, progress))
    assert first[-1] == "Run:  distlab check 1.1   or: distlab watch"
    after = list(status.whats_next(here, progress, tasks[3]))
    assert after[-1] == "Run:  distlab check 1.5   or: distlab watch 1.5", "1.1 is still open"


def next_id(here: CourseFolder, after: str = "") -> str:
    task = state.load(here).next_task(here, here.task(after) if after else None)
    return task.id if task else ""


def test_what_is_next_is_of_the_phase_that_was_worked_on_last(two_phases: CourseFolder) -> None:
    assert next_id(two_phases) == "1.1"
    has_come_out(two_phases, t2_1="passed", t1_4="failed")
    assert next_id(two_phases) == "2.2"
    has_come_out(two_phases, t1_1="passed")
    assert next_id(two_phases) == "1.2"
    has_come_out(two_phases, t2_1="passed")
    assert next_id(two_phases) == "2.2"


def test_a_phase_is_finished_before_another_is_begun(two_phases: CourseFolder) -> None:
    first, second = (phase.tasks for phase in two_phases.course.phases[:2])
    state.remember(
        two_phases, {task.id: state.Record("passed") for task in second if task.id != "2.3"}
    )
    assert next_id(two_phases, second[-1].id) == "2.3"
    assert next_id(two_phases, first[-1].id) == "1.1"
    state.remember(two_phases, {"2.3": state.Record("passed")})
    assert next_id(two_phases) == next_id(two_phases, "2.3") == "1.1"
    state.remember(two_phases, {task.id: state.Record("passed") for task in first})
    assert next_id(two_phases) == next_id(two_phases, "1.1") == ""


def test_a_grading_of_all_tasks_is_no_sign_of_what_is_worked_on(two_phases: CourseFolder) -> None:
    has_come_out(two_phases, t2_1="passed")
    has_come_out(two_phases, t1_1="passed")
    has_come_out(two_phases, t1_1="passed", t1_2="todo", t2_1="passed", t2_2="todo")
    assert next_id(two_phases) == "1.2"
    has_come_out(two_phases, t1_1="passed", t1_2="todo", t2_1="passed", t2_2="passed")
    assert next_id(two_phases) == "2.3"


def test_keys_show_hints_differences_and_all_tasks(two_phases: CourseFolder) -> None:
    here = two_phases
    templates.keep(here)
    _, lines = session(here, saying(1, ("1.4", "hang", 0)), "h", "h", "d", "c", "?")
    assert [line for line in lines if line.startswith("Hint")] == [
        "Hint 1: a question",
        "Hint 2: the idea",
    ]
    assert "1.4 has not passed yet: the solution is shown once it has" in lines
    assert any(f"0/{len(COURSE.phases[0].tasks)} tasks" in line for line in lines)
    _, lines = session(here, saying(0, ("1.4", "passed", 5)), "d")
    assert "+++ solution: exchange" in lines


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (saying(3, text="INTERNALERROR> no disk"), "INTERNALERROR> no disk"),
        (saying(5), "Nothing ran: the suite has no test for the tasks that were asked for."),
    ],
)
def test_c_says_why_the_grader_failed(here: CourseFolder, run: grading.Run, says: str) -> None:
    _, lines = session(here, run, "c")
    assert says in lines[lines.index("grading all tasks …") :]


def test_the_time_of_a_world_holds_for_every_grading_of_a_session(two_phases: CourseFolder) -> None:
    here = two_phases
    asked: list[list[str]] = []

    def run(arguments: list[str]) -> tuple[int, str]:
        asked.append(arguments)
        return saying(1, ("1.4", "failed", 0))(arguments)

    options = grading.world_timeout(7.5)
    watching = watch.Watch(here, here.task("1.4"), run, screen_into([]), options)
    watching.run(typed("c", watch.QUIT))
    assert len(asked) == 1 + len(here.course.tasks)
    assert all(run[run.index("--world-timeout") + 1] == "7.5" for run in asked)


def test_a_signal_that_comes_just_before_a_wait_ends_it(here: CourseFolder) -> None:
    """Then nothing wakes the main thread: here it is another thread that the signal reaches."""
    events: Queue[str] = Queue()

    def strikes() -> None:
        time.sleep(0.3)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        time.sleep(10)
        events.put(watch.QUIT)  # should nobody have noticed

    threading.Thread(target=strikes, daemon=True).start()
    run = saying(1, ("1.4", "failed", 0))
    with pytest.raises(KeyboardInterrupt):
        watch.Watch(here, here.task("1.4"), run, screen_into([])).run(events)
    assert events.empty(), "it was noticed with the next event only"


def typed(*keys: str) -> "Queue[str]":
    """Keys that come one by one: each is waited for."""

    class Keys(Queue[str]):
        def get(self, block: bool = True, timeout: float | None = None) -> str:
            return next(coming) if block else super().get(block=False)

    coming = iter(keys)
    return Keys()


def failing_while(events: "Queue[str]", *came: Sequence[str]) -> tuple[grading.Run, list[str]]:
    """What fails, and during whose gradings, one after the other, events come; what was asked."""
    asked: list[str] = []
    coming = iter(came)

    def run(arguments: list[str]) -> tuple[int, str]:
        asked.append(arguments[arguments.index("-k") + 1])
        for event in next(coming, [watch.QUIT]):
            events.put(event)
        return saying(1, (asked[-1], "failed", 0))(arguments)

    return run, asked


def test_keys_of_a_grading_are_answered_after_it_and_a_save_before_them(
    here: CourseFolder,
) -> None:
    events = typed(watch.QUIT)
    run, asked = failing_while(events, ["h", "n", watch.SAVED, "h", watch.SAVED], [])
    lines: list[str] = []
    watch.Watch(here, here.task("1.4"), run, screen_into(lines)).run(events)
    assert asked == ["1.4", "1.4"]
    starts = ("grading", "✘", "Hint", "1.4 has not passed")
    told = [line.partition(":")[0] for line in lines if line.startswith(starts)]
    verdict = ["grading 1.4 exchange …", "✘ 1.4 exchange"]
    refusal = "1.4 has not passed yet; h shows a hint"
    assert told == [*verdict, *verdict, verdict[1], "Hint 1", verdict[1], refusal]


def test_q_during_a_grading_leaves_before_anything_else(here: CourseFolder) -> None:
    events: Queue[str] = Queue()
    run, asked = failing_while(events, ["h", watch.SAVED, "q", "c"])
    lines: list[str] = []
    watch.Watch(here, here.task("1.4"), run, screen_into(lines)).run(events)
    assert (asked, lines) == (["1.4"], ["grading 1.4 exchange …"])


def test_c_shows_each_verdict_as_it_comes_and_q_leaves_in_between(here: CourseFolder) -> None:
    events = typed("c")
    run, asked = failing_while(events, [], [], [], ["q"])
    lines: list[str] = []
    watch.Watch(here, here.task("1.4"), run, screen_into(lines)).run(events)
    assert asked == ["1.4", "1.1", "1.2", "1.3"]
    assert lines[-3:] == [
        "grading all tasks …",
        "✘ 1.1 shard_indices: failed (0/5 points, 0.1 s)",
        "✘ 1.2 build_loader: failed (0/5 points, 0.1 s)",
    ]


def test_a_hint_leaves_the_verdict_on_the_screen(here: CourseFolder) -> None:
    advice = ["Task 1.4: deadlock", *(f"  rank {rank} waits" for rank in range(40))]
    run = saying(1, ("1.4", "hang", 0), advice=advice)
    for width, height in ((200, 100), (80, 24), (60, 20)):
        screens: list[list[str]] = []

        def say(lines: Iterable[str], screens: list[list[str]] = screens) -> None:
            screens[-1].extend(lines)

        def clear(screens: list[list[str]] = screens) -> None:
            screens.append([])

        screen = Screen(say, clear, lambda size=(width, height): size)
        events = typed("h", "h", watch.QUIT)
        watch.Watch(here, here.task("1.4"), run, screen).run(events)
        for hint, shown in zip((1, 2), screens[-2:], strict=True):
            assert shown[:2] == ["✘ 1.4 exchange: hang (0/5 points, 0.1 s)", "Task 1.4: deadlock"]
            assert any(line.startswith(f"Hint {hint}") for line in shown)
            assert shown[-1].endswith("(grades on every save)")
            assert len(shown) < height
            assert max(map(len, shown)) <= width
        state.load(here).path.unlink()


def test_lines_break_between_words(here: CourseFolder) -> None:
    line = "  rank 0 waits for rank 1 to receive, and rank 1 waits for rank 0 to receive."
    assert wrapped(["short", line, ""], 40) == [
        "short",
        "  rank 0 waits for rank 1 to receive,",
        "    and rank 1 waits for rank 0 to",
        "    receive.",
        "",
    ]
    assert "".join(wrapped(["x" * 100], 40)).replace(" ", "") == "x" * 100


def test_the_last_verdict_leads_to_what_was_built(
    two_phases: CourseFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = two_phases
    built = "phase1_data_parallel/guidelines.md#what-you-have-built"
    passed = {task.id: state.Record("passed") for task in here.course.tasks}
    state.remember(here, {id: record for id, record in passed.items() if id != "1.4"})
    run = saying(0, ("1.4", "passed", 5))
    _, lines = session(here, run)
    assert any(line.endswith(built) for line in lines)
    assert status.ALL_PASSED in lines
    assert "n next" not in lines[-1]
    monkeypatch.setattr(grading, "captured_in", lambda _: run)
    for command in ("check 1.4", "status", ""):
        assert distlab(*command.split()) == 0
        assert capsys.readouterr().out.count(built) == 1
    for phase in here.course.phases:
        assert f"\n## {status.BUILT}\n" in (here.root / phase.folder / "guidelines.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_save_gets_its_verdict_from_the_warm_process(here: CourseFolder) -> None:
    events: Queue[str] = Queue()
    grader = WarmGrader(here)
    try:
        arguments = grading.for_task(here, here.task("1.4"))
        outcomes, seconds = [], []
        with watch.saves_into(events, here):
            time.sleep(0.5)  # the watcher starts
            for body in (WRONG, DEADLOCK, RIGHT):
                started = time.monotonic()
                write_exchange(here, body)
                assert events.get(timeout=20) == watch.SAVED
                graded = grading.grade(here, arguments, grader)
                outcomes.append(graded.tasks["1.4"].outcome)
                seconds.append(time.monotonic() - started)
        assert outcomes == ["failed", "hang", "passed"]
        assert min(seconds) < 2
    finally:
        grader.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="terminals of its own")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_watch_on_a_terminal_leaves_nothing_behind(
    here: CourseFolder, number: signal.Signals, code: int
) -> None:
    write_exchange(here, WRONG)
    with on_a_terminal("watch", "1.4") as (process, terminal):
        screen = read_until(terminal, "grades on every save")
        assert "✘ 1.4 exchange: failed" in screen
        os.write(terminal, b"h")
        screen = read_until(terminal, "grades on every save")
        assert "✘ 1.4 exchange: failed" in screen
        assert "Hint 1: a question" in screen
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(timeout=20) == code
        assert psutil.wait_procs(family, timeout=10)[1] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="terminals of its own")
def test_q_leaves_a_grading_at_once(here: CourseFolder) -> None:
    started = here.root / "started"
    write_exchange(here, f"    open({str(started)!r}, 'w').close()\n    while True: pass\n")
    with on_a_terminal("watch", "1.4", "--world-timeout", "600") as (process, terminal):
        wait_until(started.exists)
        family = psutil.Process(process.pid).children(recursive=True)
        os.write(terminal, b"q")
        assert process.wait(timeout=20) == 0, "and not after the two minutes of the grading"
        assert psutil.wait_procs(family, timeout=10)[1] == []


@contextmanager
def on_a_terminal(*arguments: str) -> "Iterator[tuple[subprocess.Popen[bytes], int]]":
    """The command, and our end of the terminal that it runs on."""
    import pty

    ours, theirs = pty.openpty()
    kept = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, all it starts ignore it
    with subprocess.Popen(
        [sys.executable, "-m", "distlab", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=grading.environment(),
        start_new_session=True,
    ) as process:
        os.close(theirs)
        signal.signal(signal.SIGHUP, kept)
        try:
            yield process, ours
        finally:
            process.kill()  # else a test that fails waits for it
    os.close(ours)


def read_until(descriptor: int, text: str) -> str:
    screen, deadline = b"", time.monotonic() + 60
    while text.encode() not in screen:
        assert select.select([descriptor], [], [], deadline - time.monotonic())[0], screen
        screen += os.read(descriptor, 4096)
    return screen.decode(errors="replace")
