"""scripts/phase4.py under torchrun ends with the same bits if it is killed, stopped and rerun."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
NUM_STEPS, TIMEOUT_S = 150, 1200


def start(folder: Path) -> subprocess.Popen[str]:
    command = (*TORCHRUN, "scripts/phase4.py", str(folder), str(NUM_STEPS))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def last_bits(printed: str) -> str:
    found = re.search(rf"after step {NUM_STEPS}: ([0-9a-f ]+)", printed)
    assert found, printed
    return found[1]


def wait_for_a_checkpoint(
    run: subprocess.Popen[str], folder: Path, before: Collection[Path]
) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while {*folder.glob("step-*")} <= {*before}:
        assert run.poll() is None, "it ended before it saved"
        assert time.monotonic() < end_s, "no checkpoint in time"
        time.sleep(0.01)


def workers_of(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the two workers, which torchrun starts in separate sessions."""
    children = psutil.Process(run.pid).children()
    workers = [child for child in children if os.getsid(child.pid) == child.pid]
    assert len(workers) == 2
    return workers


def interrupt(folder: Path, number: int) -> str:
    """Start a run, send a rank a signal after a new checkpoint, and return what the run prints."""
    before = {*folder.glob("step-*")}
    run = start(folder)
    wait_for_a_checkpoint(run, folder, before)
    os.kill(workers_of(run)[-1].pid, number)
    printed = run.communicate(timeout=TIMEOUT_S)[0]
    assert run.returncode != 0
    return printed


@pytest.mark.slow
def test_a_run_that_is_killed_and_stopped_ends_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed = last_bits(start(tmp_path / "undisturbed").communicate(timeout=TIMEOUT_S)[0])
    folder = tmp_path / "run"
    interrupt(folder, signal.SIGKILL)
    stopped = interrupt(folder, signal.SIGTERM)
    assert re.search(r"stopped after step \d+", stopped), stopped
    again = start(folder).communicate(timeout=TIMEOUT_S)[0]
    assert re.search(r"goes on after step \d+", again), again
    assert last_bits(again) == undisturbed
