"""How the trainer ends if something is wrong: its exit code, and one clear line."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from little_runs import little
from picture_folders import of_folder, write_pictures
from processes import free_port

from distlab.production import errors, program, reports, watch, world
from distlab.production.config import Config
from distlab.production.errors import ConfigError
from distlab.production.program import run_program
from solutions.phase4_production import imagenet_trainer
from solutions.phase4_production.checkpoint import load_checkpoint
from solutions.phase4_production.imagenet_trainer import train

ROOT = Path(__file__).parents[3]
Ended = tuple[int, str]  # exit code and error output
Start = Callable[..., Ended]


@pytest.fixture
def start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Start:
    """Return a function that runs the trainer in this process, on one rank, as its command does."""

    def started(config: Config, *words: str) -> Ended:
        path = tmp_path / "my.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
        capfd.readouterr()
        code = run_program(train, "how to use it", ["--config", str(path), *words])
        return code, capfd.readouterr().err

    return started


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of 24 training pictures, one of which is corrupt."""
    folder = write_pictures(tmp_path / "data", {"ant": 12, "bee": 12})
    (folder / "train" / "bee" / "7.jpg").write_bytes(b"\xff\xd8 no picture")
    return folder


def of_pictures(folder: Path, run_dir: Path, **changes: Any) -> Config:
    known = {"run_dir": run_dir, "batch_size": 8, "epochs": 2}
    return of_folder(folder, **{**known, **changes})


def noted(run_dir: Path, name: str) -> list[float]:
    lines = (run_dir / "metrics.rank0.jsonl").read_text(encoding="utf-8").splitlines()
    return [record[name] for record in map(json.loads, lines) if name in record]


def exit_code(run_dir: Path) -> int:
    return int((run_dir / "exit_code").read_text())


# --- before anything starts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--epoch 3", "there is no key 'epoch'. Did you mean 'epochs'?"),
        ("--epochs three", "epochs: 'three' is wrong: expected a whole number"),
        ("--epochs", "--epochs has no value"),
        ("--impl theirs", "--impl theirs: use solution or mine"),
        ("--compression sign --strategy fsdp", "averaged whole"),
    ],
)
def test_a_wrong_command_line_starts_nothing(
    start: Start, tmp_path: Path, words: str, told: str
) -> None:
    code, text = start(little(tmp_path / "run"), *words.split())
    assert code == 78
    assert text.startswith("error: ")
    assert told in text
    assert len(text.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_says_how_to_use_it(capfd: pytest.CaptureFixture[str], word: str) -> None:
    assert run_program(train, imagenet_trainer.__doc__ or "", ["--lr", "1", word]) == 0
    told = capfd.readouterr().out
    assert "--config" in told
    assert "75 stopped and saved, run it again" in told


def test_a_finished_run_says_so_and_keeps_its_result(start: Start, tmp_path: Path) -> None:
    run, large = tmp_path / "run", {"batch_size": 1024}
    assert start(little(run, **large))[0] == 0
    before = (run / "result.json").read_text()
    code, told = start(little(run, **large))
    assert (code, (run / "result.json").read_text()) == (0, before)
    assert f"{run} is complete, so nothing is trained: raise epochs" in told
    code, told = start(little(run, epochs=1, **large))
    assert (code, (run / "result.json").read_text()) == (78, before)
    assert f"{run} has been trained for 2 epochs, and epochs is 1" in told
    assert "epochs: 2" in (run / "config.yaml").read_text()


def test_ctrl_c_before_the_first_step_is_one_line(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imagenet_trainer, "open_data", mock.Mock(side_effect=KeyboardInterrupt))
    code, told = start(little(tmp_path / "run"))
    assert code == 75
    assert told.splitlines()[-1].startswith("error: interrupted before the first step")
    assert "start the same command again" in told


# --- errors on one of several ranks --------------------------------------------------------------


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Make this process a rank of torchrun, and return what it calls to end itself."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended = mock.Mock()
    monkeypatch.setattr(program, "end_process", ended)
    return ended


def run_and_raise(run_dir: Path, error: Exception) -> None:
    def train(config: Config, _lessons: object) -> None:
        raise error

    run_program(train, "", ["--config", "configs/digits_cpu.yaml", "--run_dir", str(run_dir)])


def test_a_crash_is_told_and_waits_for_the_checkpoint_that_is_being_written(
    tmp_path: Path, ended: mock.Mock, capfd: pytest.CaptureFixture[str]
) -> None:
    has_ended = threading.Event()
    ended.side_effect = lambda _code: has_ended.set()
    outcome: list[bool] = []
    saver = threading.Thread(target=lambda: outcome.append(has_ended.wait(0.5)))
    saver.start()
    run_and_raise(tmp_path, ValueError("a bug"))
    saver.join()
    assert outcome == [False], "the process ended while it saved"
    ended.assert_called_once_with(1)
    assert exit_code(tmp_path) == 1
    told = capfd.readouterr().err
    assert told.startswith(
        "rank 1 of 2 raised ValueError: a bug\n\nTraceback (most recent call last)"
    )


def test_an_answer_keeps_its_code_where_the_group_cannot_be_left(
    tmp_path: Path,
    ended: mock.Mock,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    release = threading.Event()
    monkeypatch.setattr(world, "LEAVE_S", 0.1)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", release.wait)
    try:
        run_and_raise(tmp_path, ConfigError("wrong"))
    finally:
        release.set()
    ended.assert_called_once_with(78)
    assert exit_code(tmp_path) == 78
    assert capfd.readouterr().err == "rank 1: error: wrong\n"


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_signal_that_nohup_ignores_stops_no_training(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        stopping = world.stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (signal.SIGHUP in stopping) == (handler is signal.SIG_DFL)
    assert {signal.SIGTERM, signal.SIGUSR1} < {*stopping}


def test_a_rank_that_does_not_come_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "JOIN_S", 0.5)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **address}.items():
        monkeypatch.setenv(name, value)
    config = little(tmp_path / "run").model_copy(update={"heartbeat_timeout_s": 1.0})
    with pytest.raises(dist.DistError, match="1/2 clients joined"), world.joined(config):
        pass


def test_lessons_that_are_not_written_are_named(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    code, told = start(little(tmp_path / "run", compression="sign"), "--impl", "mine")
    assert code == 78
    assert "this needs what you have not written yet" in told
    assert "4.11" in told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_gpus": 3}, "num_gpus is 3, and this node has started 1"),
        ({"strategy": "course", "communication_pattern": "parameter_server"}, "a worker at least"),
        ({"strategy": "course", "pipeline_parallelism": 2}, "needs a multiple of 2 ranks"),
        ({"strategy": "course", "tensor_parallelism": 3}, "needs a multiple of 3 ranks"),
    ],
)
def test_too_few_ranks(start: Start, tmp_path: Path, changes: Any, told: str) -> None:
    code, text = start(little(tmp_path / "run", **changes))
    assert (code, exit_code(tmp_path / "run") if "num_gpus" not in changes else 78) == (78, 78)
    assert told in text


def test_a_file_at_the_run_folders_path(start: Start, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    code, error = start(little(tmp_path / "run"))
    assert (code, "run_dir" in error) == (78, True)
    assert (tmp_path / "run").read_text() == "mine"


HOLDS = """
import fcntl, os, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print(os.getpid(), flush=True)
time.sleep(600)
"""
LEAVES_A_WORKER = HOLDS.replace("print", "if os.fork(): sys.exit()\nprint")


@contextmanager
def locked_by(program: str, lock: Path) -> Iterator[None]:
    """Start a program that locks a file and prints a pid; kill that pid after the block."""
    command = [sys.executable, "-c", program, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        try:
            yield
        finally:
            os.kill(number, signal.SIGKILL)


def test_a_worker_that_outlives_its_rank_holds_no_folder(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with locked_by(LEAVES_A_WORKER, lock), lock.open("w") as file:
        assert world._locked(file)


def test_a_rank_that_ends_itself_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = (["python", "-c", "from multiprocessing.resource_tracker import main"], ["python"])
    tracker, worker = (mock.Mock(cmdline=lambda words=words: words) for words in commands)
    this_process = mock.Mock(children=lambda recursive: [tracker, worker] if recursive else [])
    monkeypatch.setattr(watch.psutil, "Process", lambda: this_process)
    watch._end_workers()
    assert (tracker.kill.call_count, worker.kill.call_count) == (0, 1)


def test_another_training_in_the_same_folder(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "LOCK_S", 0.0)
    (tmp_path / "run").mkdir()
    with locked_by(HOLDS, tmp_path / "run" / "lock"):
        code, told = start(little(tmp_path / "run"))
    assert code == errors.EXIT_IN_USE  # a file server may only think so, for a while
    assert f"another training writes into {tmp_path}/run: wait for its end" in told
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_port_in_use(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "PORT_S", 0.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, told = start(little(tmp_path / "run", metrics_port=port))
    assert (code, exit_code(tmp_path / "run")) == (78, 78)
    assert f"metrics_port {port}: rank 0 cannot have port {port} for its page" in told
    assert "in use. Choose another metrics_port, or 0 for no pages" in told
    assert "any free port" not in told, "0 means something else to the exporter"


# --- data ----------------------------------------------------------------------------------------


def test_a_damaged_picture_ends_a_training_that_allows_none(
    start: Start, tmp_path: Path, pictures: Path
) -> None:
    run_dir = tmp_path / "run"
    code, told = start(of_pictures(pictures, run_dir))
    assert (code, exit_code(run_dir)) == (78, 78)
    assert f"warning: {pictures}/train/bee/7.jpg cannot be read" in told
    assert "max_bad_images is 0: replace them, or allow so many. Step 3 is saved." in told
    loaded = load_checkpoint(run_dir / "checkpoints")
    assert loaded is not None
    assert loaded.step == 3
    shutil.copy(pictures / "train" / "bee" / "6.jpg", pictures / "train" / "bee" / "7.jpg")
    assert start(of_pictures(pictures, run_dir))[0] == 0
    assert exit_code(run_dir) == 0


def test_a_damaged_picture_is_left_out_and_counted_where_it_may_be(
    start: Start, tmp_path: Path, pictures: Path
) -> None:
    run_dir = tmp_path / "run"
    code, told = start(of_pictures(pictures, run_dir, max_bad_images=1, mixup=0.2))
    assert code == 0, told
    assert noted(run_dir, "bad_images_total") == [1, 1]  # counted again in each epoch
    assert noted(run_dir, "samples_total") == [24, 48]


def test_a_loss_without_a_number_is_told(start: Start, tmp_path: Path) -> None:
    with mock.patch("torch.nn.functional.cross_entropy", _no_number):
        code, told = start(little(tmp_path / "run", data="synthetic", batch_size=1024, epochs=1))
    assert code == 78
    assert "the loss is nan: try a smaller lr than 0.02" in told


def _no_number(logits: torch.Tensor, *_targets: Any, **_options: Any) -> torch.Tensor:
    return logits.sum() * float("nan")


# --- disks ---------------------------------------------------------------------------------------


def test_a_save_that_fails_is_told_and_counted_and_training_goes_on(
    start: Start, tmp_path: Path, pictures: Path
) -> None:
    run_dir = tmp_path / "run"
    real, steps = imagenet_trainer.Checkpoints._write, list[int]()

    def full_at_first(self: Any, state: Any, step: int) -> None:
        steps.append(step)
        if len(steps) <= 2:
            raise OSError(28, "No space left on device")
        real(self, state, step)

    config = of_pictures(pictures, run_dir, max_bad_images=1, save_every=1, async_save=False)
    with mock.patch.object(imagenet_trainer.Checkpoints, "_write", full_at_first):
        code, told = start(config)
    assert code == 0, told
    assert told.count("is not saved: [Errno 28] No space left on device. Training goes on") == 2
    assert noted(run_dir, "failed_saves_total") == [2, 2]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_last_save_that_fails_is_tried_again(
    start: Start, tmp_path: Path, pictures: Path
) -> None:
    failing = mock.Mock(side_effect=OSError(28, "No space left on device"))
    config = of_pictures(pictures, tmp_path / "run", max_bad_images=1, epochs=1, save_every=3)
    with mock.patch.object(imagenet_trainer.Checkpoints, "_write", failing):
        code, told = start(config)
    assert (code, exit_code(tmp_path / "run")) == (74, 74)
    assert "error: step 3 is not saved: [Errno 28] No space left on device" in told
    assert failing.call_count == 2
    assert start(config)[0] == 0
