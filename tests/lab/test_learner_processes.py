"""The learner's commands as processes: real grading runs, signals, terminals and closed streams."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

import psutil
import pytest
from commands import (
    DEADLOCK,
    RIGHT,
    WRONG,
    copy_course,
    distlab,
    started,
    write_exchange,
)
from processes import FreshPytest, wait_until

from distlab.learner import grading, watch
from distlab.learner.folder import CourseFolder
from distlab.learner.grader_server import WarmGrader

LONGEST_S = 600.0  # limit on waiting for something that must happen


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CourseFolder:
    monkeypatch.chdir(tmp_path)
    return copy_course(tmp_path)


# --- grading runs --------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked")
def test_the_first_hour(here: CourseFolder, capfd: pytest.CaptureFixture[str]) -> None:
    write_exchange(here, DEADLOCK)
    assert distlab("check", "1.3") == 1
    printed = capfd.readouterr().out
    points = here.course.task("1.3").points
    assert printed.startswith(f"✘ 1.3 exchange: hang (0/{points} points, ")
    assert "Task 1.3: deadlock" in printed
    assert "See who waits for whom: distlab trace 1.3 --ranks 2" in printed
    assert "template_collectives.py:" in printed
    assert "Stuck? distlab hint 1.3" in printed
    write_exchange(here, RIGHT)
    assert distlab("watch", "1.3") == 0, "without a terminal, one check"
    printed = capfd.readouterr().out
    assert printed.startswith(f"✔ 1.3 exchange: passed ({points}/{points} points, ")
    assert "distlab diff 1.3" in printed
    assert "Next: 1.4" in printed
    assert "\x1b" not in printed


def test_verdicts_of_pytest_on_the_templates_count_in_status_too(
    fresh_pytest: FreshPytest, here: CourseFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    write_exchange(here, RIGHT)
    for extra in ([], ["--impl", "solution", "-k", "1.7"]):
        fresh_pytest("tests/test_phase1.py", "-q", *extra, folder=here.root)
    assert distlab("status") == 0
    printed = capfd.readouterr().out
    assert re.search(r"✔ 1.3 +exchange +passed$", printed, re.MULTILINE), printed
    assert not re.search(r"✔ 1.7", printed)


@pytest.mark.usefixtures("forked")
def test_several_tasks_share_one_process(
    here: CourseFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    write_exchange(here, RIGHT)
    before = psutil.Process().children()
    assert distlab("check", "1.3", "1.4") == grading.NOTHING_RAN, "the suite has no 1.4"
    assert "✔ 1.3 exchange: passed" in capfd.readouterr().out
    assert psutil.Process().children() == before


@pytest.mark.usefixtures("forked")
def test_a_save_gets_its_verdict_from_the_warm_process(here: CourseFolder) -> None:
    events: Queue[str] = Queue()
    grader = WarmGrader(here)
    arguments = grading.for_task(here, here.task("1.3"))
    outcomes = []
    try:
        with watch.saves_into(events, here):
            for body in (WRONG, DEADLOCK, RIGHT):
                save_until_noticed(here, body, events)
                graded = grading.grade(here, arguments, grader)
                outcomes.append(graded.tasks["1.3"].outcome.value)
        assert outcomes == ["failed", "hang", "passed"]
    finally:
        grader.close()


def save_until_noticed(here: CourseFolder, body: str, events: "Queue[str]") -> None:
    """Rewrite the file until the watcher, which may still be starting, reports it."""
    deadline = time.monotonic() + LONGEST_S
    while events.empty():
        assert time.monotonic() < deadline
        write_exchange(here, body)
        time.sleep(0.3)
    while not events.empty():
        assert events.get() == watch.SAVED


# --- ends ----------------------------------------------------------------------------------------


def write_endless(here: CourseFolder) -> Path:
    """Write an ``exchange`` that creates a file and then never ends; return the file's path."""
    begun = here.root / "begun"
    write_exchange(here, f"    open({str(begun)!r}, 'w').close()\n    while True: pass\n")
    return begun


@pytest.mark.parametrize(
    ("command", "number"), [("check 1.3", signal.SIGTERM), ("grade", signal.SIGKILL)]
)
def test_nothing_is_left_of_a_grading_that_was_ended(
    here: CourseFolder, command: str, number: signal.Signals
) -> None:
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux's kernel ends children")
    begun = write_endless(here)
    arguments = [sys.executable, "-m", "distlab", *command.split(), "--world-timeout", "600"]
    with subprocess.Popen(arguments, env=grading.environment(), stdout=subprocess.DEVNULL) as done:
        try:
            wait_until(begun.exists)
            family = psutil.Process(done.pid).children(recursive=True)
            assert len(family) >= 3, "pytest, its fork server, a rank"
        finally:
            done.send_signal(number)  # otherwise, nothing would end it
        assert done.wait(LONGEST_S) == (143 if number == signal.SIGTERM else -number)
        assert psutil.wait_procs(family, timeout=LONGEST_S)[1] == []


@contextmanager
def on_a_terminal(*arguments: str) -> "Iterator[tuple[subprocess.Popen[bytes], int]]":
    """Start the command on a terminal; yield its process and our end of the terminal."""
    import pty

    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "distlab", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=grading.environment(),
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            process.kill()  # otherwise, a failing test would wait for it
    os.close(ours)


def read_until(descriptor: int, text: str) -> str:
    screen, deadline = b"", time.monotonic() + LONGEST_S
    while text.encode() not in screen:
        assert select.select([descriptor], [], [], deadline - time.monotonic())[0], screen
        screen += os.read(descriptor, 4096)
    return screen.decode(errors="replace")


def test_watch_on_a_terminal_answers_keys_and_leaves_nothing_behind(here: CourseFolder) -> None:
    write_exchange(here, WRONG)
    with on_a_terminal("watch", "1.3") as (process, terminal):
        assert "✘ 1.3 exchange: failed" in read_until(terminal, "grades on every save")
        os.write(terminal, b"h")
        screen = read_until(terminal, "grades on every save")
        assert "✘ 1.3 exchange: failed" in screen
        assert "Hint 1: a question" in screen
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONGEST_S) == 143
        assert psutil.wait_procs(family, timeout=LONGEST_S)[1] == []


# --- how the command begins and ends -------------------------------------------------------------


def test_status_imports_neither_torch_nor_pytest(here: CourseFolder) -> None:
    code = (
        "import sys, distlab.cli\n"
        "try: distlab.cli.main(['status'])\n"
        "finally: print({'torch', 'numpy', 'pytest', 'watchfiles'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_reader_that_has_gone_is_no_error(here: CourseFolder) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = started("status", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "closed", "code"), [("status", "<&- >&- 2>&-", 0), ("diff 1.3", "2>&-", 2)]
)
def test_closed_streams_leave_the_exit_code_true(
    here: CourseFolder, arguments: str, closed: str, code: int
) -> None:
    command = f"exec {sys.executable} -m distlab {arguments} {closed}"
    assert subprocess.run(["sh", "-c", command]).returncode == code


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", "status"),
        ("inside exec", "status"),
        ("torch", "trace 1.3 --impl solution"),
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
if {module!r} == "inside exec":  # dataclasses call exec when a module is loaded
    import distlab.cli.app
    distlab.cli.app.run = lambda _: exec("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
distlab.cli.main({arguments.split()!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n"), done.stderr
