"""scripts/mnist_mpi.py counts the calls that buckets save, on MPI and on gloo."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mpirun import mpirun, needs_mpi

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "scripts/mnist_mpi.py")
RANKS, BATCH, NUM_IMAGES, TIMEOUT_S = 2, 128, 601, 240
NUM_STEPS = -(-(NUM_IMAGES // RANKS) // BATCH)  # one image is left over; the last batch is small

HERE: dict[str, Any] = runpy.run_path(SCRIPT)
PARAMETERS = [*HERE["convnet"]().parameters()]
CALLS = {"one by one (1.10)": NUM_STEPS * len(PARAMETERS)} | dict.fromkeys(
    ("all at once (1.10)", "in buckets (3.11)"), NUM_STEPS
)


@pytest.fixture(scope="module")
def on_mpi(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of two ranks under mpirun, without MNIST on disk."""
    nowhere = str(tmp_path_factory.mktemp("data"))
    done = mpirun(RANKS, SCRIPT, "--images", str(NUM_IMAGES), DISTLAB_DATA=nowhere)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(printed: str) -> dict[str, tuple[int, int, str]]:
    """Return each averaging method's calls, total bytes, and losses."""
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
def test_gloo_counts_and_loses_the_same(on_mpi: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--images", str(NUM_IMAGES)],
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
