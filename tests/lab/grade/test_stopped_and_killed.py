"""If a grader process is stopped, killed or interrupted, grading ends and leaves nothing behind."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import processes
import psutil
import pytest

from distlab import launch
from distlab.launch import fork_server
from distlab.learner import child_processes, folder, grading
from distlab.learner.grader_server import WarmGrader

ROOT = Path(__file__).parents[3]
LONGEST_S = 300.0  # a test waits at most this long for something that must happen


def returns_after(seconds: float) -> int:
    time.sleep(seconds)
    return 1


def server_of_next_world() -> int:
    launch.run(returns_after, 1, 0.0, backend="gloo")
    return fork_server._idle[-1].process.pid


def test_a_server_that_was_stopped_before_the_world_is_replaced() -> None:
    os.kill(server_of_next_world(), signal.SIGSTOP)
    assert launch.run(returns_after, 2, 0.0, backend="gloo") == [1, 1]


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_server_that_is_lost_ends_its_world(how: signal.Signals) -> None:
    server = server_of_next_world()
    stop = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -{how.value} {server}"])
    with pytest.raises(launch.SetupError, match="the next run starts a new one"):
        launch.run(returns_after, 2, 60.0, backend="gloo")
    stop.wait()
    assert not psutil.pid_exists(server)
    assert launch.run(returns_after, 2, 0.0, backend="gloo") == [1, 1]


# The commands

SLEEPS = "import time, sys; print('begun', flush=True); time.sleep(600)"


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_child_that_was_stopped_is_ended(sleeper: "subprocess.Popen[str]") -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    with child_processes.not_left_stopped(sleeper):
        assert sleeper.communicate()[0] == ""
    assert sleeper.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_warm_grader_that_was_stopped_is_an_error_and_the_next_one_works() -> None:
    grader = WarmGrader(folder.find(ROOT))
    try:
        os.kill(grader._server.pid, signal.SIGSTOP)
        assert grader(["--version"]) == (3, ENDED)
        assert grader(["--version"])[0] == 0
    finally:
        grader.close()


ENDED = "the grader's process ended; the next grading starts another one"
GRADE = ["-m", "distlab", "grade", "--impl", "solution", "--backend", "sim"]
PYTEST = ["-m", "pytest", "tests/test_phase1.py", "-q", "--impl=solution", "--backend=sim"]


def ended_by_ctrl_c(command: list[str], after_s: float) -> tuple[int, str, list[psutil.Process]]:
    """Interrupt a command; return its exit code, its output, and the processes still running."""
    mark = f"{os.getpid()}-{after_s}"
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, processes.MARK: mark, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=LONGEST_S)[0]
    deadline = time.monotonic() + LONGEST_S
    while (left := processes.marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for orphan in left:
        orphan.kill()
    return process.returncode, output, left


def test_ctrl_c_while_a_fork_server_is_put_aside_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_server: object) -> bool:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), fork_server.borrowed() as borrowed:
        monkeypatch.setattr(fork_server.ForkServer, "is_stopped", interrupted)
    assert borrowed.process.poll() is not None


_RANDOM = random.Random(7)
MOMENTS = [round(_RANDOM.uniform(0.3, 8.0), 2) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("after_s", MOMENTS)
@pytest.mark.parametrize(("command", "code"), [(GRADE, 130), (PYTEST, 2)], ids=["grade", "pytest"])
def test_ctrl_c_at_any_moment_leaves_nothing(command: list[str], code: int, after_s: float) -> None:
    ended, output, left = ended_by_ctrl_c(command, after_s)
    assert ended in (code, -signal.SIGINT), output  # or killed by SIGINT, which shells show as 130
    assert "/distlab/" not in output, "a traceback of ours; python and pytest may be importing"
    assert left == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_grading_whose_pytest_is_stopped_or_killed_ends(
    how: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    begun: list[psutil.Process] = []

    def strike() -> None:
        while not begun or not (servers := begun[0].children()):
            begun[:] = [p for p in psutil.Process().children() if "runpy" in str(p.cmdline())]
        begun.extend(servers)
        begun[0].send_signal(how)

    striking = threading.Thread(target=strike)
    striking.start()
    code, _ = grading.captured_in(folder.find(ROOT))([*PYTEST[2:], "-k", "1.1"])
    striking.join()
    assert code == -signal.SIGKILL
    assert "stopped, or ended by SIGKILL" in capfd.readouterr().err
    assert psutil.wait_procs(begun, timeout=LONGEST_S)[1] == []
