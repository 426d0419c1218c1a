"""``distlab train`` in the worlds of torchrun and of the simulator."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import distlab

SMALL = ("--data=synthetic", "--epochs=1", "--communication_pattern=naive")


@pytest.mark.usefixtures("forked")
def test_train_joins_the_world_of_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    own = ["-m", "distlab", "train", *SMALL, "--num_gpus=2", f"--run_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, *torchrun, *own], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("epoch 1 of 1: ") == 1, "one process reports"


def test_simulated_ranks_learn_exactly_what_one_process_learns(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    losses = []
    for ranks, cluster in ((1, ()), (3, ()), (3, ("--cluster=dgx-h100",))):
        run = tmp_path / str(len(losses))
        where = ("--backend=sim", f"--num_gpus={ranks}", *cluster, "--precision=fp64")
        assert distlab("train", *SMALL, *where, f"--run_dir={run}") == 0
        lines = (run / "metrics.rank0.jsonl").read_text().splitlines()
        losses.append([record["loss"] for line in lines if "loss" in (record := json.loads(line))])
    alone, simulated, on_gpus = losses
    assert simulated == on_gpus
    assert simulated == pytest.approx(alone, rel=1e-12, abs=0)
    told = "".join(capfd.readouterr())
    assert "simulated: times are virtual" in told
    assert re.search(r"collectives of rank 0 among all ranks: .*all_reduce \(\d+ B\)", told)
