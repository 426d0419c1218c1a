"""The `distlab` command: its output, and one-line errors for bad options."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import distlab

from distlab import doctor
from distlab.bench import all_reduce
from solutions.phase1_data_parallel.collectives import ALL_REDUCES


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["sim", "--algorithm", "x"], "'auto', 'ring', 'tree', 'recursive_doubling'"),
        (
            ["trian"],
            "Valid commands: bench, challenge, chaos, ",
        ),
        (["--versoin"], "Valid options: --version"),
        (["doctor", "--x"], "distlab doctor: No such option: --x.\n"),
        (["chaos", "--max-kills", "5"], "distlab chaos: No such option: --max-kills."),
        (["chaos", "--max_kills=5"], "distlab chaos: No such option: --max_kills."),
        (
            ["chaos", "--corruption=5"],
            "distlab chaos: No such option: --corruption. Did you mean '--corruptions'? Valid ",
        ),
        (["chaos", "--kills", "-1"], "'--kills'"),
        (["chaos", "--kills", "many"], "'--kills'"),
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


def test_train_takes_the_keys_of_a_configuration(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert distlab("train", "--help") == 0
    told = capfd.readouterr().out
    assert "    --model resnet18                    cnn, resnet18, resnet50, vit_s16" in told
    assert all(len(line) <= 100 for line in told.splitlines())
    assert distlab("train", "--epoch", "3") == 78
    assert capfd.readouterr().err == (
        "error: the command line: there is no key 'epoch'. Did you mean 'epochs'?\n"
    )
    missing = ["--data", "imagefolder", "--data-dir", str(tmp_path), "--backend", "sim"]
    assert distlab("train", *missing, f"--run_dir={tmp_path / 'run'}") == 78
    told = "".join(capfd.readouterr())
    assert "Traceback" not in told
    assert str(tmp_path) in told


def test_the_command_line_does_not_import_torch() -> None:
    code = "import sys, distlab.cli.sim; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


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
