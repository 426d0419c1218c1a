"""scripts/chaos.py tracks the states of ranks, and compares results bit for bit."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.progress import Progress

from distlab.chaos.bits import counted, differences
from distlab.chaos.observer import COLOURS, Observer
from scripts import chaos
from scripts.chaos import Blows, Chaos

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="reads other processes' environments"
)
TINY = {
    "model": "transformer",
    "data": "synthetic",
    "image_size": "16",
    "batch_size": "64",
    "optimizer": "adamw",
    "lr": "0.004",
    "num_workers": "0",
    "device": "cpu",
    "tensorboard": "false",
    "save_every": "8",
    "heartbeat_timeout_s": "60",
    "mixup": "0.2",
    "ema_decay": "0.9",
}


# --- states of a rank ----------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """A child process, started as torchrun starts a rank."""
    environment = {**os.environ, "RANK": "0"}
    process = subprocess.Popen(["/bin/sleep", "600"], env=environment)
    yield process
    process.kill()
    process.wait()


def states(observer: Observer) -> list[str]:
    return [span.state for span in observer.spans[0]]


def test_the_states_of_a_rank(sleeper: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    log, heartbeat = tmp_path / "log", tmp_path / "heartbeat.rank0"
    heartbeat.touch()  # left behind by a rank of an earlier launch
    log.touch()
    observer = Observer(tmp_path, log, 1, 2)
    observer.look(os.getpid())
    observer.look(os.getpid())
    assert states(observer) == ["starting"]
    os.utime(heartbeat, ns=(1, 1))  # any change counts, even to an earlier time
    observer.look(os.getpid())
    assert observer.all_run
    for line in ("step 32 of 64  epoch 1.00\n", "epoch 1 of 2: 70% right\n"):
        with open(log, "a") as file:
            file.write(line)
        observer.look(os.getpid())
    assert (observer.step, observer.num_steps) == (32, 64)
    sleeper.send_signal(signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    observer.look(os.getpid())
    assert not observer.all_run
    sleeper.kill()
    sleeper.wait()
    observer.look(os.getpid())
    starting, training, evaluating, *later = COLOURS
    assert states(observer) == [starting, training, evaluating, training, *later]
    ends = [span.end_s for span in observer.spans[0]]
    assert ends[:-1] == [span.begin_s for span in observer.spans[0][1:]]


# --- comparisons ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "is_equal"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (torch.tensor([1.0]), None, False),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0]).bfloat16(), True),
        (np.array([1, 2]), np.array([1, 2]), True),
        (np.array([1, 2]), np.array([1, 3]), False),
        (3, 3, True),
        (3, 3.0, False),
        ("a", "b", False),
    ],
)
def test_equal_means_the_same_bits(a: object, b: object, is_equal: bool) -> None:
    assert differences({"x": a, "y": [1]}, {"x": b, "y": [1]}) == ([] if is_equal else ["['x']"])


def test_what_one_of_them_lacks_is_a_difference() -> None:
    assert differences({"x": [1, 2]}, {"x": [1]}) == ["['x'][1]"]
    assert differences({}, {"x": None}) == ["['x']"]
    assert counted({"x": torch.ones(1000, 2), "y": [1, "a"]}) == (
        "1 tensors with 2,000 numbers, 2 other values"
    )


# --- a training run ------------------------------------------------------------------------------


def test_a_kill_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chaos, "GAP_S", (0.2, 0.4))
    run = Chaos({**TINY, "epochs": "2"}, 1, tmp_path / "out")
    blows = Blows(["kill"], 0, 1, 600.0)
    run.train("undisturbed", Progress(disable=True))
    run.train("disturbed", Progress(disable=True), blows)
    assert [blow.kind for blow in blows.given] == ["kill"]
    assert run.compare(blows) == 0
    assert "1 blows (1 x kill)" in capsys.readouterr().out
    assert (tmp_path / "out/gantt.png").stat().st_size > 10_000

    latest = max((tmp_path / "out/disturbed/checkpoints").glob("step-*"))
    shutil.rmtree(latest)  # so that an older checkpoint is compared
    assert run.compare(blows) == 1
    assert "NOT EQUAL" in capsys.readouterr().out
