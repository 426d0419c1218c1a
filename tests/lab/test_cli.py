"""The `distlab` command: its output, and one-line errors for bad options."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from distlab import chosen, data, doctor, models, training
from distlab.bench import all_reduce
from distlab.cli import main, train
from distlab.launch import choices
from solutions.phase1_data_parallel.collectives import ALL_REDUCES
from solutions.phase1_data_parallel.trainer import AVERAGE_GRADIENTS


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
        (["train", "--all-reduce", "x"], "'native', 'naive', 'recursive_doubling'"),
        (
            ["train", "--modell", "cnn"],
            "Valid options: --dataset, --model, --num-workers, --parallelism",
        ),
        (
            ["trian"],
            "Valid commands: bench, challenge, chaos, ",
        ),
        (["--versoin"], "Valid options: --version"),
        (["doctor", "--x"], "distlab doctor: No such option: --x.\n"),
        (["train", "--max-steps", "5"], "distlab train: No such option: --max-steps."),
        (["train", "--max_steps=5"], "distlab train: No such option: --max_steps."),
        (
            ["train", "--num_worker=5"],
            "distlab train: No such option: --num_worker. Did you mean '--num-workers'? Valid ",
        ),
        (["train", "--num-workers", "0"], "'--num-workers'"),
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


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            "--num-workers 3 --batch-size 64",
            "--batch-size 64 cannot be shared equally by 3 workers: use 63 or 66",
        ),
        (
            "--num-workers 2 --batch-size 5000",
            "--batch-size 5000 is more than the 1437 training images of digits: use at most 1436",
        ),
        (
            "--num-workers 2 --batch-size 1438 --backend sim",
            "--batch-size 1438 is more than the 1437 training images of digits: use at most 1436",
        ),
        ("--lr inf", "--lr inf is not a learning rate: it must be above 0 and finite, say 0.05"),
        (
            "--lr nan --model gpt",
            "--lr nan is not a learning rate: it must be above 0 and finite, say 0.003",
        ),
        ("--lr 0", "--lr 0.0 is not a learning rate: it must be above 0 and finite, say 0.05"),
        ("--lr -1", "--lr -1.0 is not a learning rate: it must be above 0 and finite, say 0.05"),
        ("--cluster dgx-h100", "cluster='dgx-h100' is for backend sim, not for backend auto"),
    ],
)
def test_options_that_cannot_work_get_one_line_with_ones_that_do(
    options: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert distlab("train", *options.split()) == 2
    assert capfd.readouterr() == ("", f"distlab train: {line}\n")


def test_errors_of_a_rank_made_for_people_come_without_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ["--dataset", "imagefolder", "--data-root", str(tmp_path), "--num-workers", "2"]
    assert distlab("train", *arguments) == 1
    message = capsys.readouterr().err
    assert "DataError" in message
    assert str(tmp_path) in message
    assert "Traceback" not in message


def test_the_commands_offer_what_the_libraries_have() -> None:
    assert set(get_args(train.Dataset)) == set(data.DATASETS)
    assert set(get_args(train.Model)) == set(models.MODELS) == set(training.RECIPES)
    assert set(get_args(train.AllReduce)) == set(ALL_REDUCES)
    assert set(get_args(train.Gradients)) == set(AVERAGE_GRADIENTS)
    assert set(get_args(train.Backend)) == set(choices.BACKENDS)
    assert get_args(train.Impl) == chosen.CHOICES
    assert set(get_args(train.Device)) == set(choices.DEVICES)


def test_the_command_line_does_not_import_torch() -> None:
    code = "import sys, distlab.cli.sim; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        ([], "simulated cluster: one switch with a GPU per worker"),
        (["--cluster", "dgx-h100"], "simulated cluster dgx-h100"),
    ],
)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_first_line_says_that_simulated_times_are_virtual(
    cluster: list[str], name: str, workers: str, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--backend", "sim", *cluster, "--num-workers", workers, "--epochs", "1"]
    assert distlab("train", *options) == 0
    first, *_, last = capfd.readouterr().out.splitlines()
    assert f", {name}, times are virtual, not measured, batch 64" in first
    assert " after 1 epoch (best" in last


def test_bench_all_reduce_prints_times_by_size_and_strategy_and_the_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_reduce, "SIZES_BYTES", (4, 65536))
    assert distlab("bench", "all-reduce", "--ranks", "2", "--repeats", "2") == 0
    table = capsys.readouterr().out
    title, _, heading, *_ = table.splitlines()
    assert title.strip() == "2 gloo ranks: µs (times native), median of 2"
    names = [name.replace("_", " ") for name in ("bytes", "exchange", *ALL_REDUCES)]
    assert [cell.strip() for cell in heading.strip("┃").split("┃")] == names
    for size in ("4", "65,536"):
        times = r"│ +[\d,]+ \(\d+\.\d\) "
        assert re.search(rf"│ {size} +{times}│ +[\d,]+ \(1\.0\) {times}{times}│", table)
    *_, meaning, fit = table.splitlines()
    assert meaning.startswith("exchange: no all-reduce, ")
    assert fit.startswith("one message: α ")


def test_the_doctor_runs_what_it_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert distlab("doctor") == 0
    report = capsys.readouterr().out
    assert "8 simulated GPUs" in report
    for subject in ("torch", "torchvision", "world gloo", "world mpi", "world sim", "data"):
        assert subject in report


def test_the_doctor_reports_a_gloo_that_cannot_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_world_gloo,))
    assert distlab("doctor") == 1
    report = capsys.readouterr().out
    assert "broken" in report
    assert "nowhere0" in report
    assert "GLOO_SOCKET_IFNAME" in report, "what to do"


@pytest.mark.parametrize("command", ["demo", "doctor"])
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_what_starts_its_own_workers_is_run_alone(
    command: str,
    launcher: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {
        "mpirun": ("PMI_RANK", "PMI_SIZE"),
        "torchrun": ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
    for name in variables[launcher]:
        monkeypatch.setenv(name, "2")
    assert distlab(command) == 2
    line = f"distlab {command}: this starts its own workers: run it alone, without {launcher}\n"
    assert capsys.readouterr() == ("", line)
