"""distlab train: every model learns, in each world, whatever starts the ranks."""

import math
import signal
import subprocess
import sys

import psutil
import pytest
from test_cli import distlab

from distlab import demo, models, training


@pytest.mark.parametrize("model", models.MODELS)
def test_train_learns_with_every_model(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", model, "--num_workers", "2", "--epochs", "1", "--batch-size", "128"]
    assert distlab("train", *arguments) == 0
    first, epoch, last = capfd.readouterr().out.splitlines()
    assert first.startswith(f"rank 0/2  {model} (")
    assert "batch 128 = 2 x 64" in first
    assert epoch.startswith("rank 0/2  epoch 1  loss ")
    assert last.startswith("test accuracy ")
    accuracy = float(last.removeprefix("test accuracy ").split("%")[0])
    assert accuracy > 25  # of 10 digits, or of 17 grey values


def test_gpt_trains_on_synthetic_images_of_few_tokens(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--dataset", "synthetic", "--model", "gpt", "--num-workers", "2", "--epochs", "1"]
    assert distlab("train", *options) == 0
    headline, epoch, _ = capfd.readouterr().out.splitlines()
    assert "on synthetic (512 images of 63 tokens), cpu, batch 64 = 2 x 32, " in headline
    assert float(epoch.split("  test loss ")[1].split()[0]) < math.log(17), "worse than a guess"


def first_loss(*options: str, capfd: pytest.CaptureFixture[str]) -> str:
    assert distlab("train", "--num-workers", "1", "--epochs", "1", *options) == 0
    return capfd.readouterr().out.split("  loss ")[1].split()[0]


def test_learning_rate_and_seed_decide_the_training(capfd: pytest.CaptureFixture[str]) -> None:
    settings = ([], ["--seed", "0"], ["--lr", "0.05"], ["--seed", "1"], ["--lr", "0.01"])
    default, seed_0, lr_005, *others = (first_loss(*options, capfd=capfd) for options in settings)
    assert default == seed_0 == lr_005
    assert len({default, *others}) == 3


def test_ctrl_c_ends_the_training_with_one_line() -> None:
    command = [sys.executable, "-m", "distlab", "train", "--num-workers", "2", "--epochs", "1000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline()[:8] for _ in range(2)] == ["rank 0/2"] * 2  # it trains
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


def test_four_workers_lose_exactly_what_one_does_in_float64() -> None:
    histories = []
    for workers in (1, 4):
        config = training.make_config(dataset="digits", model="cnn", epochs=2, num_workers=workers)
        double = training.TrainConfig(**{**vars(config), "dtype": "float64"})
        histories.append(training.train(double))
    assert demo.largest_difference(*histories) < 1e-6
    one, four = histories
    assert [e.test_accuracy for e in one] == [e.test_accuracy for e in four]
