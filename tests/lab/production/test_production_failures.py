"""The trainer under torchrun, with processes that are killed, stopped, or asked to end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from little_runs import digest, little
from paced_trainer import PACE
from processes import MARK, marked
from prometheus_client.parser import text_string_to_metric_families

from distlab.production.config import load_config
from distlab.production.hang_report import report
from distlab.production.reports import METRICS
from solutions.phase4_production.checkpoint import load_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo listens on lo")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PROGRAM = HERE / "paced_trainer.py"
TIMEOUT_S = 300
RANKS = 2
RARE = {"straggler_ratio", "perplexity", "tokens_per_s"}  # metrics that these runs do not have
FSDP = {"strategy": "fsdp"}
RANDOM = {"mixup": 0.4, "ema_decay": 0.9, "augment": "crop_flip"}


class Runs:
    """Successive torchrun launches of one training run, in a separate folder."""

    def __init__(self, folder: Path, mark: str, **changes: Any) -> None:
        self.run_dir, self.pace, self.mark = folder / "run", folder / "pace", mark
        self.pace.mkdir(parents=True)
        self.log = folder / "log"
        self.config = folder / "little.yaml"
        config = little(self.run_dir, save_every=2, **{**RANDOM, **changes})
        self.config.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")

    def start(self, *, hold: int = -1, restarts: int = 0) -> None:
        """Start two ranks with torchrun; they wait after step ``hold``."""
        self.hold(hold)
        options = ["--nproc-per-node", str(RANKS), "--max-restarts", str(restarts), "--standalone"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1"]
        told = {PACE: str(self.pace), MARK: self.mark, "OMP_NUM_THREADS": "1"}
        paths = [str(ROOT), str(HERE), str(HERE.parent)]
        told |= {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"}
        with self.log.open("ab") as log:
            self.agent = subprocess.Popen(
                [*torchrun, *options, str(PROGRAM), "--config", str(self.config)],
                cwd=ROOT,
                env={**os.environ, **told},
                stdout=log,
                stderr=log,
            )

    def hold(self, step: int) -> None:
        """Change the step after which ranks wait."""
        (self.pace / "new").write_text(f"{step}")
        (self.pace / "new").replace(self.pace / "hold")

    def waiting(self, step: int, *ranks: int) -> list[int]:
        """Wait until ranks, by default all, wait at a step; return their pids."""
        files = [self.pace / f"rank{rank}" for rank in ranks or range(RANKS)]
        pids: list[int] = []

        def wait_or_have_ended() -> bool:
            told = [file.read_text().split() for file in files if file.exists()]
            pids[:] = [int(pid) for pid, at in told if int(at) == step and is_alive(int(pid))]
            return len(pids) == len(files) or self.agent.poll() is not None

        self.wait_for(wait_or_have_ended, f"no ranks wait at step {step}")
        assert self.agent.poll() is None, self.told()
        return pids

    def wait_for(self, is_so: Callable[[], bool], otherwise: str) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while not is_so():
            if time.monotonic() > end_s:
                pytest.fail(f"{otherwise}; {self.agent.poll()}\n{self.told()}")
            time.sleep(0.05)

    def wait_for_word(self, word: str) -> None:
        self.wait_for(lambda: word in self.told(), f"nobody says {word!r}")

    def ended(self, *pids: int) -> int:
        """Wait until torchrun and these processes have ended; return torchrun's exit code."""
        self.wait_for(lambda: self.agent.poll() is not None, "torchrun goes on")
        self.wait_for(lambda: not any(map(is_alive, pids)), "ranks go on")
        return int(self.agent.returncode)

    def end(self) -> None:
        """Kill torchrun and its ranks if a test failed before they ended."""
        if self.agent.poll() is None:
            agent = psutil.Process(self.agent.pid)
            for process in [*agent.children(recursive=True), agent]:
                process.kill()
            self.agent.wait()

    def told(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def exit_code(self) -> int:
        return int((self.run_dir / "exit_code").read_text())

    def hangs(self) -> int:
        """Return how many starts have been ended because of a hang."""
        return len([*self.run_dir.glob("hang/*/reason.json")])

    def state(self) -> dict[str, str]:
        """Return a hash of each part of the newest checkpoint, and its step."""
        loaded = load_checkpoint(self.run_dir / "checkpoints")
        assert loaded is not None
        parts = {name: digest(part) for name, part in loaded.state["parts"].items()}
        return {**parts, "step": str(loaded.step), "all": digest(loaded.state)}


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


@pytest.fixture(scope="module")
def mark() -> Iterator[str]:
    """A value in the environment of this file's processes, by which they are found and killed."""
    name = uuid.uuid4().hex
    yield name
    for process in marked(name):
        process.kill()


@pytest.fixture
def runs(mark: str, tmp_path: Path) -> Iterator[Callable[..., Runs]]:
    """Return a function that makes ``Runs``; processes still running are killed after the test."""
    made: list[Runs] = []

    def make(**changes: Any) -> Runs:
        made.append(Runs(tmp_path, mark, **changes))
        return made[-1]

    yield make
    for run in made:
        run.end()


def free_ports() -> int:
    """Return the first of two consecutive free ports."""
    for port in range(20_000 + os.getpid() % 5_000 * 2, 32_000, 2):
        # Below 32768, where no connection is given a port before the run takes it.
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise OSError("no two consecutive ports are free")


# --- the undisturbed run -------------------------------------------------------------------------

Pages = dict[int, dict[str, tuple[float, dict[str, str]]]]


@pytest.fixture(scope="module")
def undisturbed(
    mark: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Runs, dict[str, str], Pages]:
    """An undisturbed run, its final state, and its Prometheus pages halfway through."""
    port = free_ports()
    runs = Runs(tmp_path_factory.mktemp("calm"), mark, metrics_port=port, tensorboard=True)
    runs.start(hold=4)
    runs.waiting(4)
    pages = {rank: page_at(port + rank) for rank in range(RANKS)}
    runs.hold(-1)
    assert runs.ended() == 0, runs.told()
    return runs, runs.state(), pages


def page_at(port: int) -> dict[str, tuple[float, dict[str, str]]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {s.name: (s.value, s.labels) for family in families for s in family.samples}


def test_each_rank_has_a_page_for_prometheus(undisturbed: tuple[Runs, Any, Pages]) -> None:
    _, _, pages = undisturbed
    of_evaluations = {"accuracy", "top5_accuracy", "test_loss"}
    always = {*METRICS} - RARE
    for rank, page in pages.items():
        assert {"step", *always} - of_evaluations <= {*page}
        assert {*page} <= {"step", *METRICS}
        assert all(labels == {"run": "run", "rank": f"{rank}"} for _, labels in page.values())
        assert page["step"][0] == 3
        assert page["samples_total"][0] == 21
        assert page["epoch"][0] == 1


def test_a_run_leaves_its_numbers_a_picture_and_a_result(
    undisturbed: tuple[Runs, Any, Pages],
) -> None:
    runs, _, _ = undisturbed
    for rank in range(RANKS):
        text = (runs.run_dir / f"metrics.rank{rank}.jsonl").read_text(encoding="utf-8")
        records = [json.loads(line) for line in text.splitlines()]
        names = {name for record in records for name in record}
        assert {*METRICS} - RARE <= names <= {"step", *METRICS}
        assert [r["step"] for r in records if "loss" in r] == [3, 6]
        assert (runs.run_dir / f"heartbeat.rank{rank}").exists()
    result = json.loads((runs.run_dir / "result.json").read_text())
    assert (result["steps"], result["epochs"]) == (6, 2)
    for name in ("accuracy", "top5_accuracy"):
        assert result[name] == records[-1][name]
    assert result["loss"] == records[-1]["test_loss"]
    assert (runs.run_dir / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert runs.exit_code() == 0
    assert load_config(runs.run_dir / "config.yaml") == load_config(runs.config)
    assert any((runs.run_dir / "tensorboard").iterdir())


# --- kills ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked")
def test_ranks_and_launchers_may_be_killed(
    runs: Callable[..., Runs], undisturbed: tuple[Runs, dict[str, str], Any]
) -> None:
    run = runs()
    run.start(hold=2, restarts=1)
    before = run.waiting(2)
    os.kill(before[1], signal.SIGKILL)  # torchrun restarts all ranks
    run.hold(3)
    after = run.waiting(3)
    assert not {*before} & {*after}

    run.agent.kill()  # the ranks notice this by themselves
    run.ended(*after)
    assert "its launcher has died. This process ends." in run.told()

    run.start(hold=4)
    asked = run.waiting(4)
    run.agent.terminate()
    run.wait_for_word("Sending process")
    run.hold(-1)
    run.ended(*asked)
    assert run.exit_code() == 75
    assert "asked to stop: saves step 5" in run.told()
    assert run.state()["step"] == "5"

    run.start()
    assert run.ended() == 0, run.told()
    assert run.exit_code() == 0
    assert run.state() == undisturbed[1]
    text = (run.run_dir / "metrics.rank0.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    assert [record["step"] for record in records] == [3, 3, 6, 6]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("keys", [{}, FSDP], ids=str)
def test_a_rank_may_be_killed_while_it_loads(runs: Callable[..., Runs], keys: Any) -> None:
    run = runs(async_save=False, **keys)
    run.start(hold=2, restarts=2)
    first = run.waiting(2)
    (run.pace / "loading").write_text("0")
    os.kill(first[1], signal.SIGKILL)
    run.hold(-1)
    loading = run.waiting(0, 0)  # another start, in which rank 0 loads
    os.kill(loading[0], signal.SIGKILL)
    run.wait_for(lambda: not any(map(is_alive, loading)), "the rank goes on")
    (run.pace / "loading").unlink()
    assert run.ended() == 0, run.told()
    assert run.told().count("goes on after step 2") == 1


@pytest.mark.usefixtures("forked")
def test_a_stopped_rank_is_noticed(
    runs: Callable[..., Runs], undisturbed: tuple[Runs, dict[str, str], Any]
) -> None:
    run = runs(heartbeat_timeout_s=3)
    run.start(hold=2, restarts=5)
    for number, (stopped, step) in enumerate(((1, 2), (0, 4)), 1):
        pids = run.waiting(step)
        os.kill(pids[stopped], signal.SIGSTOP)
        word = f"silent for more than 3 s: rank 1 (step {step})" if stopped else "does not answer"
        run.wait_for_word(word)
        run.wait_for(lambda: run.hangs() >= number, "no evidence")  # noqa: B023
        run.hold(4 if step == 2 else -1)
        assert f"rank {stopped} is stopped" in report(run.run_dir)
        os.kill(pids[stopped], signal.SIGCONT)  # else torchrun waits 30 s before it kills the rank
    assert run.ended() == 0, run.told()
    assert run.state() == undisturbed[1]


def test_a_save_that_takes_longer_than_the_heartbeats_limit_ends_nothing(
    runs: Callable[..., Runs],
) -> None:
    run = runs(heartbeat_timeout_s=2)
    (run.pace / "disk").write_text("3")
    run.start()
    assert run.ended() == 0, run.told()
    assert run.hangs() == 0


def test_an_exception_on_one_rank_ends_the_run_and_is_told(runs: Callable[..., Runs]) -> None:
    run = runs()
    (run.pace / "fate").write_text("raise")
    run.start()
    assert run.ended() == 1
    assert run.exit_code() == 1
    assert "rank 1 of 2 raised ValueError: a bug on one rank\n\nTraceback" in run.told()


def test_a_hang_leaves_evidence_that_names_the_rank_and_its_line(
    runs: Callable[..., Runs],
) -> None:
    run = runs(heartbeat_timeout_s=8)
    (run.pace / "fate").write_text("loop")
    run.start()
    assert run.ended() == 1
    assert "silent for more than 8 s" in run.told()
    assert f"distlab hang {run.run_dir} shows where each rank was" in run.told()
    headline, rank_0, rank_1, *_ = report(run.run_dir).splitlines()
    assert headline.startswith("hang (missing rank): rank 0 waits in ")
    assert re.search(
        "for rank 1, but rank 1 is running at paced_trainer.py:[0-9]+ in meet$", headline
    )
    assert re.search(
        r"rank 0  \w+ \(call \d+ of ranks 0 and 1\), .*imagenet_trainer.py:\d+ in ", rank_0
    )
    assert re.search(r"rank 1  running .*paced_trainer.py:\d+ in meet$", rank_1)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("keys", [{}, FSDP], ids=str)
def test_only_the_rank_that_is_stopped_in_a_step_is_silent(
    runs: Callable[..., Runs], keys: dict[str, Any]
) -> None:
    run = runs(heartbeat_timeout_s=10, **keys)
    (run.pace / "inside").write_text("3")
    run.start()
    (stopped,) = run.waiting(3, 1)
    os.kill(stopped, signal.SIGSTOP)
    run.wait_for_word("silent for more than 10 s")
    os.kill(stopped, signal.SIGKILL)
    assert run.ended(stopped) == 1
    silent = [line for line in run.told().splitlines() if "silent for more" in line]
    assert all("s: rank 1 (step" in line for line in silent), silent
