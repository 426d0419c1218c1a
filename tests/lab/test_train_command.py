"""``distlab train``: models learn in every world, whatever starts the ranks."""

import signal
import subprocess
import sys

import psutil
import pytest
import torch
import torch.distributed as dist
from test_cli import distlab

from distlab import training


@pytest.mark.parametrize("model", ["vit", "gpt"])
def test_train_learns_with_a_model(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", model, "--num_workers", "2", "--epochs", "1", "--batch-size", "128"]
    assert distlab("train", *arguments) == 0
    first, epoch, last = capfd.readouterr().out.splitlines()
    assert first.startswith(f"rank 0/2  {model} (")
    assert "batch 128 = 2 x 64" in first
    assert epoch.startswith("rank 0/2  epoch 1  loss ")
    assert last.startswith("test accuracy ")
    accuracy = float(last.removeprefix("test accuracy ").split("%")[0])
    assert accuracy > 25  # percent; guessing is right for 1 in 10 digits, or 1 in 17 grey values


def test_ctrl_c_ends_the_training_with_one_line() -> None:
    command = [sys.executable, "-m", "distlab", "train", "--num-workers", "2", "--epochs", "1000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        # After these two lines, training has begun.
        assert [process.stdout.readline()[:8] for _ in range(2)] == ["rank 0/2"] * 2
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=30)
    assert (process.returncode, message) == (130, "interrupted\n")
    assert psutil.wait_procs(family, timeout=5)[1] == []


@pytest.mark.usefixtures("forked")
def test_train_joins_the_world_of_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["train", "--epochs", "1", "--all-reduce", "naive", "--backend", "gloo"]
    done = subprocess.run(
        [*command, "-m", "distlab", *options], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[:2]] == ["rank 0/2", "rank 0/2"]
    assert len(lines) == 3, "one process reports"


SHARED = (
    "--device cuda: gloo cannot send a GPU's tensors from rank to rank, as 2 replicas do. Leave "
    "--device out, or use NCCL, which needs a GPU for each rank: this machine has 1"
)


def test_replicas_on_gpus_that_only_gloo_connects_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(sizes: str, backend: str, device: str) -> None:
        monkeypatch.setattr(dist, "get_backend", lambda: backend)
        config = training.make_config(dataset="digits", parallelism=sizes, epochs=1)
        training.check_device(config, torch.device(device))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(training.ConfigError, match=SHARED):
        check("dp=2", "gloo", "cuda")
    check("dp=2", "gloo", "cpu")
    check("dp=2", "nccl", "cuda")
    check("tp=2", "gloo", "cuda")  # allowed, since there is one replica


def test_training_on_the_simulated_cluster_learns_exactly_the_same() -> None:
    histories = {}
    for backend, cluster in (("gloo", None), ("sim", None), ("sim", "dgx-h100")):
        config = training.make_config(
            dataset="digits",
            model="cnn",
            epochs=1,
            num_workers=2,
            all_reduce="recursive_doubling",
            backend=backend,
            cluster=cluster,
        )
        histories[backend, cluster] = training.train(config)
    (real,), *simulated = histories.values()
    assert [epoch.step_losses for (epoch,) in simulated] == [real.step_losses] * 2
