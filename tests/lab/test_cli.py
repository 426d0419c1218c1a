"""The `distlab` command: what it prints, and the one line that bad options get."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from distlab import data, demo, doctor, models, plot, training
from distlab.cli import main, train
from distlab.data import DataError
from distlab.launch import api
from solutions.phase1_data_parallel.collectives import ALL_REDUCES
from solutions.phase1_data_parallel.trainer import EpochResult


def distlab(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["train", "--model", "cn"],
            "distlab train: Invalid value for '--model': 'cn' is not one of 'cnn', 'resnet18', "
            "'vit', 'gpt'.",
        ),
        (["train", "--dataset", "x"], "'digits', 'mnist', 'cifar10', 'synthetic'"),
        (["train", "--all_reduce", "x"], "'native', 'naive', 'recursive_doubling'"),
        (["train", "--modell", "cnn"], "Valid: --dataset, --model, --num_workers, --epochs"),
        (["trian"], "Valid: bench, demo, doctor, sim, train"),
        (["train", "--num_workers", "0"], "'--num_workers'"),
        (["train", "--epochs", "many"], "'--epochs'"),
    ],
)
def test_bad_options_get_one_line_that_names_the_valid_ones(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distlab(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert line in printed.err


def test_options_that_do_not_fit_together_name_ones_that_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert distlab("train", "--num_workers", "3", "--batch_size", "64") == 1
    assert capsys.readouterr().err == (
        "--batch_size 64 cannot be shared equally by 3 workers: use 63 or 66\n"
    )


def test_errors_of_a_rank_made_for_people_come_without_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ["--dataset", "imagefolder", "--data_root", str(tmp_path), "--num_workers", "2"]
    assert distlab("train", *arguments) == 1
    message = capsys.readouterr().err
    assert "DataError" in message
    assert str(tmp_path) in message
    assert "Traceback" not in message


def test_the_commands_offer_what_the_libraries_have() -> None:
    assert set(get_args(train.Dataset)) == set(data.DATASETS)
    assert set(get_args(train.Model)) == set(models.MODELS) == set(training.RECIPES)
    assert set(get_args(train.AllReduce)) == set(ALL_REDUCES)
    assert set(get_args(train.Backend)) == set(api.BACKENDS)
    assert set(get_args(train.Device)) == set(api.DEVICES)


def test_the_command_line_does_not_import_torch() -> None:
    code = "import sys, distlab.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("model", models.MODELS)
def test_train_learns_with_every_model(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", model, "--num-workers", "2", "--epochs", "1", "--batch_size", "128"]
    assert distlab("train", *arguments) == 0
    first, epoch, last = capfd.readouterr().out.splitlines()
    assert first.startswith(f"rank 0/2  {model} (")
    assert "batch 128 = 2 x 64" in first
    assert epoch.startswith("rank 0/2  epoch 1  loss ")
    assert last.startswith("test accuracy ")
    accuracy = float(last.removeprefix("test accuracy ").split("%")[0])
    assert accuracy > 25  # of 10 digits, or of 17 grey values


def test_train_joins_the_world_of_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["train", "--epochs", "1", "--all_reduce", "naive", "--backend", "gloo"]
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


def test_unset_batch_size_is_64_rounded_up_to_fit() -> None:
    sizes = {
        workers: training.make_config(
            dataset="digits", model="cnn", epochs=1, num_workers=workers
        ).batch_size
        for workers in (1, 3, 4, 5, 100)
    }
    assert sizes == {1: 64, 3: 66, 4: 64, 5: 65, 100: 100}


def test_four_workers_lose_exactly_what_one_does_in_float64() -> None:
    histories = []
    for workers in (1, 4):
        config = training.make_config(dataset="digits", model="cnn", epochs=3, num_workers=workers)
        double = training.TrainConfig(**{**vars(config), "dtype": "float64"})
        histories.append(training.train(double))
    assert demo.largest_difference(*histories) < 1e-6
    one, four = histories
    assert [e.test_accuracy for e in one] == [e.test_accuracy for e in four]


def test_curves_are_drawn(tmp_path: Path) -> None:
    history = [EpochResult(e, (1.0 / e, 0.5 / e), 0.4, 0.9, 100.0) for e in (1, 2)]
    plot.training_curves({1: history, 4: history}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_doctor_runs_what_it_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert distlab("doctor") == 0
    report = capsys.readouterr().out
    for subject in ("torch", "torchvision", "world gloo", "data"):
        assert subject in report


def test_the_doctor_says_what_to_do_about_what_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> doctor.Finding:
        raise DataError("the disk is gone")

    monkeypatch.setattr(doctor, "CHECKS", (broken,))
    assert distlab("doctor") == 1
    assert "DataError: the disk is gone" in capsys.readouterr().out
