"""launch_training.sh and launch_local, started as users do, and the configurations."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from processes import MARK, marked
from torch.distributed.run import get_args_parser

from distlab.data import DataError
from distlab.production import launching
from distlab.production.config import load_config, split_arguments
from distlab.production.launching import Nodes, _torchrun_options, launch
from distlab.production.program import config_of
from distlab.production.world import stop_signals
from scripts import launch_local

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("configs/*.yaml"))
SCRIPT = ROOT / "scripts/launch_training.sh"
TIMEOUT_S = 240
END_S = 20.0
TINY = (
    *("--model=transformer", "--data=synthetic", "--image_size=16", "--batch_size=64"),
    *("--optimizer=adamw", "--lr=0.004", "--num_workers=0", "--device=cpu", "--tensorboard=false"),
)


@pytest.fixture
def mark() -> Iterator[str]:
    """A unique value that marks a test's processes, none of which may outlive the test."""
    name = uuid.uuid4().hex
    yield name
    end_s = time.monotonic() + END_S  # data loaders end once they notice that their rank has ended
    while (left := marked(name)) and time.monotonic() < end_s:
        time.sleep(0.05)
    for process in left:
        process.kill()
    assert not left


def start(mark: str, folder: Path, command: tuple[str, ...]) -> "subprocess.Popen[str]":
    """Start a command in a folder; its output goes to the file ``log`` there."""
    folder.mkdir(exist_ok=True)
    found = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), MARK: mark}
    no_data = {"DISTLAB_DATA": str(folder / "data")}
    offline = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    with open(folder / "log", "a") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **found, **no_data, **offline},
            stdout=log,
            stderr=log,
            start_new_session=True,  # a separate process group, as in a terminal
            preexec_fn=heed_ctrl_c,
        )


def heed_ctrl_c() -> None:
    """Restore ctrl-C, which is ignored if a shell starts the tests in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def launched(mark: str, folder: Path, *options: str) -> "subprocess.Popen[str]":
    config = f"--config={ROOT / 'configs/digits_cpu.yaml'}"
    return start(mark, folder, (str(SCRIPT), config, *TINY, "--run_dir=run", *options))


def log_of(folder: Path) -> str:
    return (folder / "log").read_text()


def wait_for(text: str, folder: Path) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while text not in log_of(folder):
        assert time.monotonic() < end_s, log_of(folder)
        time.sleep(0.05)


def ranks(mark: str) -> list[psutil.Process]:
    """Return the processes that train: those with a RANK in their environment."""
    return [process for process in marked(mark) if "RANK" in process.environ()]


# --- launch_training.sh --------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads other processes' environments")
def test_killed_it_starts_again_and_saves_at_ctrl_c(mark: str, tmp_path: Path) -> None:
    """The trainer's tests check that the same command then resumes the run."""
    training = launched(mark, tmp_path, "--epochs=30", "--num_gpus=2", "--save_every=5")
    wait_for("step 10 of", tmp_path)
    ranks(mark)[0].kill()
    wait_for("is started anew; attempts left after this: 2", tmp_path)
    wait_for("step 30 of", tmp_path)
    os.killpg(training.pid, signal.SIGINT)  # a terminal signals the launcher and all ranks
    assert training.wait(TIMEOUT_S) == 75, log_of(tmp_path)
    log = log_of(tmp_path)
    assert log.count("goes on after step") == log.count("asked to stop: saves step") == 1
    assert "KeyboardInterrupt" not in log
    assert log.count("started anew") == 1


def test_torchrun_is_told_of_the_nodes_and_the_signals() -> None:
    alone, second = Nodes(1, 0, "", 3), Nodes(2, 1, "node0:29400", 4)
    for nodes in (alone, second):
        options = get_args_parser().parse_args([*_torchrun_options(nodes, 8), "program"])
        assert options.nproc_per_node == "8"
        names = {number.name for number in stop_signals()}  # except any that nohup disabled
        assert {*options.signals_to_handle.split(",")} == names >= {"SIGTERM", "SIGINT", "SIGUSR1"}
        assert options.standalone == (nodes is alone)
    assert (options.nnodes, options.max_restarts) == ("2", 4)
    assert (options.rdzv_backend, options.rdzv_endpoint) == ("c10d", "node0:29400")
    assert options.rdzv_conf == "is_host=False"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--epoch", "3"), "there is no key 'epoch'. Did you mean 'epochs'?"),
        (("--epochs", "many"), "epochs: 'many' is wrong"),
        (("--config", "nowhere.yaml"), "nowhere.yaml: No such file"),
        (("--nodes", "2"), "with its --node-rank, 0 to 1, and with --rendezvous HOST:PORT"),
        (("--nodes", "two"), "--nodes two: expected a whole number"),
        (
            ("--nodes", "2", "--node-rank", "2", "--rendezvous", "a:1"),
            "--node-rank 2 of --nodes 2: use 0 to 1",
        ),
        (("--num_gpus", "0"), "num_gpus"),
        (("--impl", "theirs"), "--impl theirs: use solution or mine"),
        (("--impl", "mine"), "this needs what you have not written yet"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(arguments) == 78
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("codes", "options", "last", "starts"),
    [
        ([0], (), 0, 1),
        ([1, 1, 0], (), 0, 3),
        ([1, 1, 1, 1], (), 1, 4),
        ([1, 1], ("--max-restarts=1",), 1, 2),
        ([1, 75], (), 75, 2),
        ([78], (), 78, 1),
        ([74], (), 74, 1),
        # On several nodes, restarting is left to torchrun.
        ([1], ("--nodes=2", "--node-rank=0", "--rendezvous=a:1"), 1, 1),
        ([-1], (), 1, 1),  # a negative code stands for a crash after a signal
    ],
)
def test_only_a_crash_is_started_anew(
    codes: list[int],
    options: tuple[str, ...],
    last: int,
    starts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = iter(codes)
    monkeypatch.setattr(
        launching, "_run_once", lambda *_: launching.End(abs(code := next(left)), code < 0)
    )
    monkeypatch.setattr(launching.os, "environ", {})
    assert launch([f"--config={CONFIGS[0]}", *options]) == last
    assert starts == len(codes) - len([*left])


# --- launch_local --------------------------------------------------------------------------------


def test_launch_local_takes_digits_where_cifar_is_not_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    unreachable = DataError("CIFAR-10 is not here\n  cause: URLError")
    monkeypatch.setattr(launch_local.data, "load", Mock(side_effect=unreachable))
    monkeypatch.setattr(
        sys, "argv", ["launch_local", *["--batch_size", "512", "--num_workers", "3"]]
    )
    trained = Mock(return_value=0)
    monkeypatch.setattr(launch_local, "launch", trained)
    assert launch_local.main() == 0
    assert "CIFAR-10 cannot be had (cause: URLError" in capsys.readouterr().err
    config = config_of(split_arguments(trained.call_args.args[0]))
    assert (config.data, config.model, config.num_gpus) == ("digits", "resnet18", 3)
    assert config.lr_batch_size == config.batch_size == 512
    assert (config.strategy, config.schedule) == ("ddp", "cosine")
    assert config.run_dir == Path("out/local/1")


# --- configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_configuration_loads_and_says_how_to_start_it(path: Path) -> None:
    config = load_config(path)
    text = path.read_text(encoding="utf-8")
    assert f"distlab train --config configs/{path.name}" in text
    assert (config.data == "imagefolder") == ("NOT RUN HERE" in text)
    assert config.run_dir.is_relative_to("out")


# --- other worlds --------------------------------------------------------------------------------

SMALL_GPT = (
    *(f"--config={ROOT / 'configs/text_cpu.yaml'}", "--epochs=1", "--batch_size=128"),
    *("--layers=2", "--width=16", "--heads=2", "--sequence_length=256"),
)


def test_it_trains_on_simulated_gpus(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    where = ("--backend=sim", "--cluster=dgx-h100", "--parallelism=dp=2,pp=2")
    assert launch([*SMALL_GPT, *where, f"--run_dir={tmp_path / 'run'}"]) == 0
    told = "".join(capfd.readouterr())
    assert "gpt on text, strategy course, 4 ranks, simulated: times are virtual" in told
    assert re.search(r"^epoch 1 of 1: perplexity \d+\.\d\d, .* test tokens right", told, re.M)
    assert re.search(r"^after “.*” it writes: .", told, re.M)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert 2 < result["perplexity"] < 256


@pytest.mark.parametrize(
    ("options", "told", "lines"),
    [
        (("--backend=sim", "--cluster=dgx"), "unknown preset 'dgx'; valid: laptop", 1),
        (("--backend=sim", "--parallelism=pp=2", "--num_gpus=3"), "a multiple of 2 ranks", 3),
        (("--backend=mpi",), "put mpirun -np", 1),
    ],
)
def test_worlds_that_cannot_be_are_refused(
    options: tuple[str, ...],
    told: str,
    lines: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert launch([*SMALL_GPT, *options, f"--run_dir={tmp_path / 'run'}"]) == 78
    printed = "".join(capfd.readouterr())
    assert printed.count(told) == printed.count("error: ") == lines
