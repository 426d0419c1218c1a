"""scripts/mnist_mpi.py: the calls that buckets save, counted in every world that trains."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mpirun import mpirun, needs_mpi
from test_data import write_mnist

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "scripts/mnist_mpi.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
RANKS, BATCH, NUM_IMAGES, TIMEOUT_S = 2, 128, 601, 240
NUM_STEPS = -(-(NUM_IMAGES // RANKS) // BATCH)  # an image is left over; the last batch is small

HERE: dict[str, Any] = runpy.run_path(SCRIPT)
PARAMETERS = [*HERE["convnet"]().parameters()]
CALLS = {"one by one (1.10)": NUM_STEPS * len(PARAMETERS)} | dict.fromkeys(
    ("all at once (1.10)", "in buckets (3.12)"), NUM_STEPS
)


@pytest.fixture(scope="module")
def on_mpi(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What two ranks of mpirun print, where there is no MNIST."""
    nowhere = str(tmp_path_factory.mktemp("data"))
    done = mpirun(RANKS, SCRIPT, "--images", str(NUM_IMAGES), DISTLAB_DATA=nowhere)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(printed: str) -> dict[str, tuple[int, int, str]]:
    """Calls, bytes in all, and losses by way."""
    row = re.compile(r"^(.*\(\d.\d+\)) +([\d,]+) +[\d,]+ +([\d,]+) +(\S+ -> \S+)$", re.MULTILINE)
    return {
        way: (int(calls.replace(",", "")), int(num_bytes.replace(",", "")), losses)
        for way, calls, num_bytes, losses in row.findall(printed)
    }


@needs_mpi
def test_calls_are_steps_times_tensors_or_one_in_each_step(on_mpi: str) -> None:
    assert {way: calls for way, (calls, _, _) in rows(on_mpi).items()} == CALLS
    factor = f"factor: {NUM_STEPS * len(PARAMETERS)} / {NUM_STEPS} = {len(PARAMETERS)}.00."
    assert factor in on_mpi


@needs_mpi
def test_all_ways_send_the_same_bytes(on_mpi: str) -> None:
    num_bytes = sum(parameter.nbytes for parameter in PARAMETERS)
    assert {sent for _, sent, _ in rows(on_mpi).values()} == {NUM_STEPS * num_bytes}


@needs_mpi
def test_mpi_s_own_group_counts_the_same_and_a_call_for_each_loss(on_mpi: str) -> None:
    counts = ", ".join(str(calls + NUM_STEPS) for calls in CALLS.values())
    assert f"calls counted by the group: {counts}; one in each step is for the loss" in on_mpi


@needs_mpi
def test_all_ways_lose_the_same(on_mpi: str) -> None:
    assert f"losses: the same in all {NUM_STEPS} steps, bit for bit" in on_mpi
    assert len({losses for _, _, losses in rows(on_mpi).values()}) == 1
    assert f"{NUM_IMAGES} images (synthetic) on 2 ranks (mpi)" in on_mpi, "and one rank prints"
    assert on_mpi.count("factor") == 1


@needs_mpi
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["alone", "torchrun"])
def test_other_worlds_count_and_lose_the_same(
    launcher: tuple[str, ...], on_mpi: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, *launcher, SCRIPT, "--images", str(NUM_IMAGES)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "DISTLAB_DATA": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout) == rows(on_mpi)
    assert "on 2 ranks (gloo)" in done.stdout
    assert "counted by the group" not in done.stdout


def test_the_report_s_calls_follow_from_its_network_and_batch() -> None:
    steps = -(-(HERE["NUM_IMAGES"] // RANKS) // HERE["BATCH"])
    assert HERE["REPORTED_IN_BUCKETS"] == steps
    assert HERE["REPORTED_CALLS"] == steps * len(PARAMETERS)
    assert f"{steps} steps, and {steps} x {len(PARAMETERS)} tensors" in HERE["REPORTED"]
    assert steps * sum(parameter.nbytes for parameter in PARAMETERS) == 194_506_680, "bytes there"


def test_real_images_are_taken_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTLAB_DATA", str(tmp_path))
    name, made_up = HERE["images"](3)
    assert (name, len(made_up), made_up[0][0].shape) == ("synthetic", 3, (1, 28, 28))
    write_mnist(tmp_path / "MNIST/raw", count=5)
    for asked, size in ((3, 3), (60_000, 5)):
        name, real = HERE["images"](asked)
        assert (name, len(real), real[1][1]) == ("mnist", size, 1)


def test_losses_that_differ_are_not_called_the_same() -> None:
    assert HERE["difference"]([[1.0, 2.0], [1.0, 2.5]]).endswith("further apart than 5.0e-01")


def test_too_few_images_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--images", "1"])
    with pytest.raises(SystemExit, match="2"):
        HERE["main"]()
    assert "--images 1: each of 2 ranks needs one or more" in capsys.readouterr().err
