"""The learner's commands, on a copy of the course with a small suite."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import Queue
from typing import get_args

import psutil
import pytest

from distlab import course
from distlab.cli import learn, main
from distlab.grade import plugin, reports
from distlab.grade.outcomes import Outcome
from distlab.learner import bodies, grading, hints, programs, source, state, status, watch
from distlab.learner import folder as folders
from distlab.learner.folder import CourseFolder
from distlab.learner.warm import WarmGrader

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
RIGHT = """    both = [dist.P2POp(dist.isend, outgoing, dst), dist.P2POp(dist.irecv, incoming, src)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CourseFolder:
    for name in ("course.toml", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("phase1_data_parallel", "solutions"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_phase1.py").write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    return folders.find()


def distlab(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert isinstance(left.value.code, int)
    return left.value.code


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
    assert "1/13 tasks  5/100 points" in printed
    assert "Next: 1.2 Load a share of every batch (30 minutes)" in printed
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
    assert "is not in the course's folder" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("check 1.55", "there is no task '1.55'; did you mean 1.5?"),
        ("hint broadcst", "there is no task 'broadcst'; did you mean broadcast?"),
        ("diff 99", "there is no task '99'; there are: 1.1, 1.2, "),
        ("diff 1.4", "1.4 has not passed yet: distlab check 1.4, or --spoil shows it anyway"),
        ("reset 1.4", "nobody to ask here: distlab reset 1.4 --yes does it"),
        ("hint 1.4 --level 4", "--level 4: a task has hints 1 to 3"),
        ("grade --phase 9", "there is no phase '9'; there are: 1"),
        ("grade --impl nowhere", "--impl nowhere: no such folder; use template, solution or a "),
        ("grade --report xml=a", "with one of json, junit, gradescope, markdown"),
        ("grade --backend x", "'auto', 'sim', 'gloo', 'nccl'"),
        (
            "trace 1.13",
            "there is no picture of 1.13; distlab trace draws 1.3, 1.4, 1.5, 1.6, 1.7, 1.9",
        ),
        ("grade --world-timeout 0", "--world-timeout 0: a number of seconds above 0"),
        ("check 1.4 --world-timeout -1", "--world-timeout -1: a number of seconds above 0"),
        ("check 1.4 --world-timeout nan", "--world-timeout nan: a number of seconds above 0"),
        ("watch 1.4 --world-timeout inf", "--world-timeout inf: a number of seconds above 0"),
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
    assert "how many ranks have the data?" in capsys.readouterr().out


def test_the_first_hint_answers_the_last_outcome(here: CourseFolder) -> None:
    has_come_out(here, t1_4="hang")
    assert hints.take(here, here.task("1.4"), state.load(here)).level == 2
    assert hints.take(here, here.task("1.4"), state.load(here)).level == 3


def test_every_task_has_its_hints(here: CourseFolder) -> None:
    assert all(len(hints.hints(here, task)) == 3 for task in here.course.tasks)


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
    source.keep_templates(here)
    assert distlab("diff", "1.8", "--spoil") == 0
    printed = capsys.readouterr().out
    assert "+++ solution: measure_all_reduce" in printed
    assert "+++ solution: fit_alpha_beta" in printed


def test_diff_says_when_there_is_none(
    here: CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    source.keep_templates(here)
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
        source.keep_templates(here)
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
    strange = b"\x0c# a page of its own \xe2\x80\xa8 and \xff\n"
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
    source.keep_templates(here)
    write_exchange(here, WRONG)
    before = (here.root / FILE).read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        source.reset(here, here.task("1.4"))
    assert (here.root / FILE).read_bytes() == before
    assert [path.name for path in (here.root / FILE).parent.glob(".*")] == []


def test_reset_says_when_it_cannot(here: CourseFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert distlab("reset", "1.4", "--yes") == 2
    assert "neither git nor .distlab/templates has" in capsys.readouterr().err
    source.keep_templates(here)
    (here.root / FILE).write_text("x = 1\n")
    assert distlab("reset", "1.4", "--yes") == 2
    assert "has no exchange to reset; git checkout -- " in capsys.readouterr().err
    assert (here.root / FILE).read_text() == "x = 1\n"


def test_reset_asks_first(
    here: CourseFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source.keep_templates(here)
    write_exchange(here, WRONG)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    questions: list[str] = []
    monkeypatch.setattr("typer.confirm", questions.append)
    assert distlab("reset", "1.4") == 1
    assert questions == [f"Put exchange in {FILE} back to the template?"]
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
    code: int, *tasks: tuple[str, str, int], text: str = "", message: str = ""
) -> grading.Run:
    """What runs no pytest, and reports (id, outcome, points of 5)."""
    keys = ("id", "outcome", "points")
    entries = [{**dict(zip(keys, task, strict=True)), "max_points": 5} for task in tasks]
    entries = [{**entry, "seconds": 0.1, "message": message} for entry in entries]

    def run(arguments: list[str]) -> tuple[int, str]:
        if tasks:
            path = report_asked_for(arguments)
            path.write_text(json.dumps({"tasks": entries}))
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
    assert grading.find_report("json=/dev/stdout") == "json=/dev/stdout"
    assert grading.find_report("json=new/a.json") == f"json={here.root / 'new/a.json'}"
    assert list((here.root / "new").iterdir()) == []
    for path, reason in (("solutions", "is a folder"), ("course.toml/a", "cannot be written")):
        assert distlab("grade", "--report", f"json={path}") == 2
        printed = capfd.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert reason in printed.err


@pytest.mark.slow
def test_what_pytest_says_of_the_templates_counts_in_status_too(
    here: CourseFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    write_exchange(here, RIGHT)
    for extra in ([], ["--impl", "solution", "-k", "1.5"], ["-k", "1.4", "--collect-only"]):
        command = [sys.executable, "-m", "pytest", "tests/test_phase1.py", "-q", *extra]
        subprocess.run(command, cwd=here.root, capture_output=True, timeout=60)
    assert distlab("status") == 0
    printed = capfd.readouterr().out
    assert re.search(r"✔ 1.4 +exchange", printed), printed
    assert "edited since" not in printed
    assert not re.search(r"✔ 1.5", printed)


@pytest.mark.slow
def test_the_first_hour(here: CourseFolder, capfd: pytest.CaptureFixture[str]) -> None:
    write_exchange(here, DEADLOCK)
    assert distlab("check", "1.4") == 1
    printed = capfd.readouterr().out
    assert printed.startswith("✘ 1.4 exchange: hang (0/5 points, ")
    assert "Task 1.4: deadlock" in printed
    assert " to receive. Who should have sent, or received, first?" in printed
    assert "See who waits for whom: distlab trace 1.4" in printed
    assert "template_collectives.py:" in printed
    assert "Stuck? distlab hint 1.4" in printed
    assert distlab("trace", "1.4") == 1
    assert "deadlock" in capfd.readouterr().out
    write_exchange(here, RIGHT)
    assert distlab("watch", "1.4") == 0, "without a terminal, one check"
    printed = capfd.readouterr().out
    assert printed.startswith("✔ 1.4 exchange: passed (5/5 points, ")
    assert "distlab diff 1.4" in printed
    assert "Next: 1.5" in printed
    assert "\x1b" not in printed


@pytest.mark.slow
def test_grade_runs_everything_anew_and_writes_reports(
    here: CourseFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    has_come_out(here, t1_4="passed", t1_5="passed")
    assert distlab("grade", "--report", "json=a.json", "--report", "markdown=b.md") == 3
    assert "the suite holds no test of it" in capfd.readouterr().out
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
    assert distlab("trace", "1.6") == 1
    assert capfd.readouterr().out.startswith("Task 1.6: all_reduce_naive, see guidelines.md#16-")


def test_whether_a_task_can_be_drawn_is_told_without_torch() -> None:
    code = (
        "import sys\nfrom distlab.learner.programs import has_program\n"
        "print(has_program('1.4'), has_program('1.13'), 'torch' in sys.modules)"
    )
    environment = grading.environment()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout.decode() == "True False False\n"
    assert programs.PROGRAMS.keys() == bodies.BODIES.keys() <= {task.id for task in COURSE.tasks}


BROADCAST_MISSING = "Task 1.5: broadcast, see guidelines.md#15-broadcast-along-a-tree"


def test_an_earlier_task_that_is_missing_is_what_is_to_be_written(
    here: CourseFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saying(1, ("1.6", "todo", 0), message=BROADCAST_MISSING)
    monkeypatch.setattr(grading, "captured_in", lambda _: run)
    assert distlab("check", "1.6") == 1
    assert capsys.readouterr().out.splitlines() == [
        "· 1.6 all_reduce_naive: needs 1.5 broadcast, which is still to be written",
        "Write broadcast in phase1_data_parallel/template_collectives.py.",
        "Read  phase1_data_parallel/guidelines.md#15-broadcast-along-a-tree",
        "Run:  distlab check 1.5   or: distlab watch 1.5",
    ]


def test_a_second_function_that_is_missing_is_named(
    here: CourseFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saying(1, ("1.8", "todo", 0), message="Task 1.8: fit_alpha_beta, see guidelines.md#18-m")
    monkeypatch.setattr(grading, "captured_in", lambda _: run)
    assert distlab("check", "1.8") == 1
    printed = capsys.readouterr().out
    assert "· 1.8 measure_all_reduce: fit_alpha_beta is not written yet\n" in printed
    assert "Write fit_alpha_beta in " in printed
    assert "Stuck? distlab hint 1.8" in printed


@pytest.mark.parametrize("command", ["check 1.4", "grade", "watch 1.4"])
def test_the_time_of_a_world_is_the_grader_s_option(
    here: CourseFolder, monkeypatch: pytest.MonkeyPatch, command: str
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

    say: Callable[[Iterable[str]], None] = lines.extend
    watching = watch.Watch(here, here.task(task), run, say, say)
    watching.run(Coming())
    return watching, lines


def test_n_goes_on_only_when_the_task_has_passed(here: CourseFolder) -> None:
    watching, lines = session(here, saying(1, ("1.4", "failed", 0)), "n")
    assert watching.task.id == "1.4"
    assert lines[-1] == "1.4 has not passed yet; h shows a hint"
    watching, lines = session(here, saying(0, ("1.4", "passed", 5)), "n")
    assert watching.task.id == "1.5", "the one after it, though 1.1 is open too"


def test_the_menu_offers_the_keys_that_do_something(here: CourseFolder) -> None:
    end = "c check all  q quit    (grades on every save)"
    _, lines = session(here, saying(1, ("1.4", "hang", 0)))
    assert lines[-1] == f"h hint  {end}", "d and n would only be refused"
    _, lines = session(here, saying(0, ("1.4", "passed", 5)))
    assert lines[-1] == f"n next  h hint  d diff  {end}"


def test_what_is_next_is_what_the_command_beside_it_watches(here: CourseFolder) -> None:
    progress, tasks = state.load(here), here.course.tasks
    first = list(status.whats_next(here, progress))
    assert first[-1] == "Run:  distlab check 1.1   or: distlab watch"
    after = list(status.whats_next(here, progress, tasks[3]))
    assert after[-1] == "Run:  distlab check 1.5   or: distlab watch 1.5", "1.1 is still open"


def test_keys_show_hints_differences_and_all_tasks(here: CourseFolder) -> None:
    source.keep_templates(here)
    _, lines = session(here, saying(1, ("1.4", "hang", 0)), "h", "h", "d", "c", "?")
    assert [line for line in lines if line.startswith("Hint")] == [
        "Hint 2: the idea",
        "Hint 3: names",
    ]
    assert "1.4 has not passed yet: the solution comes afterwards" in lines
    assert any("0/13 tasks" in line for line in lines)
    _, lines = session(here, saying(0, ("1.4", "passed", 5)), "d")
    assert "+++ solution: exchange" in lines


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (saying(3, text="INTERNALERROR> no disk"), "INTERNALERROR> no disk"),
        (saying(5), "Nothing ran: the suite holds no test of what was asked for."),
    ],
)
def test_c_says_why_the_grader_failed(here: CourseFolder, run: grading.Run, says: str) -> None:
    _, lines = session(here, run, "c")
    assert says in lines[lines.index("grading all tasks …") :]


def test_the_time_of_a_world_holds_for_every_grading_of_a_session(here: CourseFolder) -> None:
    asked: list[list[str]] = []

    def run(arguments: list[str]) -> tuple[int, str]:
        asked.append(arguments)
        return saying(1, ("1.4", "failed", 0))(arguments)

    events: Queue[str] = Queue()
    shown: list[str] = []

    def clear(lines: Iterable[str]) -> None:
        shown.extend(lines)
        if "grades on every save" in shown[-1]:
            events.put("c" if len(asked) == 1 else "q")

    options = grading.world_timeout(7.5)
    watch.Watch(here, here.task("1.4"), run, shown.extend, clear, options).run(events)
    assert len(asked) == 2
    assert all(run[run.index("--world-timeout") + 1] == "7.5" for run in asked)


def test_a_key_that_answers_a_verdict_is_not_dropped(here: CourseFolder) -> None:
    events: Queue[str] = Queue()
    lines: list[str] = []

    def clear(shown: Iterable[str]) -> None:
        lines.extend(shown)
        if "grades on every save" in lines[-1]:
            for key in ("h", "q"):
                events.put(key)

    run = saying(1, ("1.4", "failed", 0))
    watch.Watch(here, here.task("1.4"), run, lines.extend, clear).run(events)
    assert any(line.startswith("Hint") for line in lines)


def test_a_save_during_a_grading_is_graded_and_other_keys_are_dropped(here: CourseFolder) -> None:
    events: Queue[str] = Queue()
    gradings = 0

    def run(arguments: list[str]) -> tuple[int, str]:
        nonlocal gradings
        gradings += 1
        for event in [watch.SAVED, "h", watch.SAVED] if gradings == 1 else [watch.SAVED, "q"]:
            events.put(event)
        return saying(1, ("1.4", "failed", 0))(arguments)

    lines: list[str] = []
    watch.Watch(here, here.task("1.4"), run, lines.extend, lines.extend).run(events)
    assert gradings == 2
    assert not any(line.startswith("Hint") for line in lines)


@pytest.mark.slow
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
    import pty

    write_exchange(here, WRONG)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "distlab", "watch", "1.4"]
    with subprocess.Popen(
        *(command,),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=grading.environment(),
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            screen = read_until(ours, "grades on every save")
            assert "✘ 1.4 exchange: failed" in screen
            os.write(ours, b"h")
            assert "Hint 1: a question" in read_until(ours, "the next hint")
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            assert process.wait(timeout=20) == code
            assert psutil.wait_procs(family, timeout=10)[1] == []
        finally:
            process.kill()  # else a test that fails waits for it
    os.close(ours)


def read_until(descriptor: int, text: str) -> str:
    screen, deadline = b"", time.monotonic() + 60
    while text.encode() not in screen:
        assert select.select([descriptor], [], [], deadline - time.monotonic())[0], screen
        screen += os.read(descriptor, 4096)
    return screen.decode(errors="replace")
