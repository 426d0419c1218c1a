"""A container's entrypoint and probe, run as processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deployment_files import DEPLOYMENT
from processes import MARK, marked, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containers run Linux")

TIMEOUT_S = 120

# Stand-in for torchrun and the trainer. Given a code, it stores the code and exits with at most 1,
# as torchrun does. Given "wait", it reports that it is ready; at a signal, it saves and stores 75.
TRAINER = """
import os, signal, sys, time
from pathlib import Path

what, folder = sys.argv[1], Path(sys.argv[3])

def leave(code):
    (folder / "exit_code").write_text(str(code))
    sys.exit(min(code, 1))

def save(*_):
    time.sleep(0.5)
    leave(75)

signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, save)
(folder / f"ready{os.environ.get('RANK', 0)}").touch()
if what == "wait":
    time.sleep(600)
leave(int(what))
"""


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(mark: str, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a process in a new process group."""
    started: list[subprocess.Popen[bytes]] = []

    def of(command: list[str], **variables: str) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", **variables}
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True)
        started.append(process)
        return process

    yield of
    for process in started:
        process.kill()
        process.wait()


# --- the entrypoint ------------------------------------------------------------------------------


def entrypoint(folder: Path, what: object, program: str = TRAINER) -> list[str]:
    trainer = [sys.executable, "-c", program, str(what), "--run_dir", str(folder)]
    return [sys.executable, str(DEPLOYMENT / "entrypoint.py"), *trainer]


@pytest.mark.parametrize("code", [0, 1, 78])
def test_the_code_of_the_trainer_comes_through(start: Start, tmp_path: Path, code: int) -> None:
    assert start(entrypoint(tmp_path, code)).wait(TIMEOUT_S) == code


def test_a_killed_command_ends_with_128_and_its_signal(start: Start, tmp_path: Path) -> None:
    kills = "import os; os.kill(os.getpid(), 9)"
    assert start(entrypoint(tmp_path, 0, kills)).wait(TIMEOUT_S) == 137


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_lets_the_trainer_save(start: Start, tmp_path: Path, number: int) -> None:
    process = start(entrypoint(tmp_path, "wait"))
    wait_until((tmp_path / "ready0").exists)
    process.send_signal(number)
    assert process.wait(TIMEOUT_S) == 75


def test_sigusr1_to_every_process_interrupts_no_save(
    start: Start, mark: str, tmp_path: Path
) -> None:
    """Slurm sends SIGUSR1 shortly before a job's time is up, and torchrun does not handle it."""
    unheeded = TRAINER.replace("signal.signal(signal.SIGUSR1, save)", "")
    process = start(entrypoint(tmp_path, "wait", unheeded))
    wait_until((tmp_path / "ready0").exists)
    for one_of_ours in marked(mark):
        one_of_ours.send_signal(signal.SIGUSR1)
    assert process.wait(TIMEOUT_S) == 75
    assert marked(mark) == []


def test_a_second_signal_changes_nothing(start: Start, tmp_path: Path) -> None:
    """A user may press Ctrl-C twice, and each time the terminal signals the whole process group."""
    process = start(entrypoint(tmp_path, "wait"))
    wait_until((tmp_path / "ready0").exists)
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        os.killpg(process.pid, number)
    assert process.wait(TIMEOUT_S) == 75


# --- the probe -----------------------------------------------------------------------------------

MAX_AGE_S = 300
RANK = [sys.executable, "-c", "import time; time.sleep(600)", "--run_dir"]


def memory_of(folder: Path) -> Path:
    """Return the folder where the probe remembers what it has seen."""
    memory = folder.parent / f"{folder.name}-memory"
    memory.mkdir(exist_ok=True)
    return memory


def probe(folder: Path, *options: str, max_age_s: float = MAX_AGE_S) -> tuple[int, str]:
    command = [sys.executable, str(DEPLOYMENT / "liveness.py"), str(folder), str(max_age_s)]
    own = {**os.environ, "TMPDIR": str(memory_of(folder))}
    command += options
    ended = subprocess.run(command, env=own, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.stdout == ""
    return ended.returncode, ended.stderr.strip()


def start_rank(start: Start, folder: Path, rank: int) -> "subprocess.Popen[bytes]":
    """Start a stand-in for a rank; wait until it can be recognized and is a clock tick old."""
    process = start([*RANK, str(folder)], RANK=str(rank))
    cmdline = Path(f"/proc/{process.pid}/cmdline")
    wait_until(lambda: b"--run_dir" in cmdline.read_bytes())
    time.sleep(0.1)
    return process


HOURS_AGO_S = (0.0, 3600.0, -3600.0)  # how far a file server's clock is behind ours


def beat(folder: Path, rank: int, ago_s: float = 0.0) -> None:
    path = folder / f"heartbeat.rank{rank}"
    path.touch()
    seconds = time.time() - ago_s
    os.utime(path, (seconds, seconds))


@pytest.mark.parametrize("behind_s", HOURS_AGO_S)
def test_ranks_that_beat_are_alive_whatever_the_file_servers_clock(
    start: Start, tmp_path: Path, behind_s: float
) -> None:
    """The ranks' processes have run for longer than the 0 s that are allowed here."""
    for rank in (2, 3):
        start_rank(start, tmp_path, rank)
    for _ in range(3):
        for rank in (2, 3):
            beat(tmp_path, rank, behind_s)
        assert probe(tmp_path, max_age_s=0) == (0, "")
    assert probe(tmp_path, "--started") == (0, "")


def test_each_silent_rank_is_named(start: Start, tmp_path: Path) -> None:
    for rank in range(3):
        start_rank(start, tmp_path, rank)
        beat(tmp_path, rank)
    assert probe(tmp_path, max_age_s=0) == (0, "")
    time.sleep(0.1)  # ten ticks of the clock of /proc
    beat(tmp_path, 1)
    code, text = probe(tmp_path, max_age_s=0)
    assert code == 1
    lines = text.splitlines()
    assert [line.split(" has been silent for ")[0] for line in lines] == ["rank 0", "rank 2"]
    assert all(line.endswith(", 0 s are allowed") for line in lines)


def test_a_new_process_gets_time_whatever_its_predecessor_left(
    start: Start, tmp_path: Path
) -> None:
    beat(tmp_path, 0, ago_s=10 * MAX_AGE_S)
    for _ in range(2):  # the second process is as new as the first was
        process = start_rank(start, tmp_path, 0)
        assert probe(tmp_path, max_age_s=0) == (0, "")
        code, text = probe(tmp_path, "--started")
        assert (code, text.rpartition(" in ")[0]) == (1, "rank 0 has given no heartbeat")
        process.kill()
        process.wait()


def test_a_probe_that_was_cut_off_while_it_wrote_is_forgotten(start: Start, tmp_path: Path) -> None:
    start_rank(start, tmp_path, 0)
    assert probe(tmp_path) == (0, "")
    [memory] = memory_of(tmp_path).iterdir()
    memory.write_text(memory.read_text()[:9])
    assert probe(tmp_path) == (0, "")


def test_ranks_of_other_nodes_and_other_runs_are_not_its_business(
    start: Start, tmp_path: Path
) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    for folder in (ours, others):
        folder.mkdir()
    start_rank(start, ours, 1)
    beat(ours, 1)
    beat(ours, 0, ago_s=10 * MAX_AGE_S)  # left by a rank on another node
    start_rank(start, others, 5)
    assert probe(ours) == (0, "")
    beat(ours, 1)
    assert probe(ours, "--started") == (0, "")
