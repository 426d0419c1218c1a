"""Disturb a training run for a few minutes, and check that the result equals an undisturbed run's.

    python -m scripts.chaos --minutes 3 --ranks 3
    python -m scripts.chaos --config configs/config.yaml --ranks 4 --epochs 12

The configuration is trained twice. During the second run, at moments that --seed determines, ranks
are killed (SIGKILL) or stopped (SIGSTOP), and torchrun itself is killed. A stopped rank looks to
the others as if its connection were lost; it continues after a moment, or once they have given up.
If torchrun ends early, the same command is started again. In the end, the last checkpoints of both
runs must be equal bit for bit: parameters, optimizer, generators, everything. out/chaos/gantt.png
shows what happened.

Exit codes: 0 equal · 1 not equal, or a training run has failed · 78 wrong configuration.
"""

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn

from distlab import lessons
from distlab.chaos.bits import counted, differences
from distlab.chaos.observer import Blow, Observer, draw_gantt
from distlab.production.config import split_arguments
from distlab.production.errors import EXIT_CANNOT_SAVE, EXIT_WRONG, ConfigError
from distlab.production.launching import environment
from distlab.production.program import config_of

KINDS = ("kill", "pause", "stop", "agent")
GAP_S = (2.0, 8.0)  # time between the moment all ranks run and the next blow
STOPPED_S = {"pause": 2.0, "stop": math.inf}  # longest stops; they end earlier if a rank is down
KEYS = {"heartbeat_timeout_s": "10", "save_every": "20"}  # defaults; options override them
HOPELESS = (str(EXIT_WRONG), str(EXIT_CANNOT_SAVE))  # exit codes after which a restart cannot help
MAX_STARTS = 200
LOOK_S = 0.1


def main() -> int:
    """Train without and with disturbances, and compare the results."""
    options, keys = _parser().parse_known_args()
    given = {"config": options.config, **KEYS, **split_arguments(keys)}
    try:
        chaos = Chaos(given, options.ranks, options.out)
        with _bar() as bar:
            chaos.train("undisturbed", bar)
            kinds = _endless(options.kinds, Random(options.seed))
            blows = Blows(kinds, options.seed, options.ranks, 60 * options.minutes)
            chaos.train("disturbed", bar, blows)
        return chaos.compare(blows)
    except (ConfigError, TrainingFailedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_WRONG if isinstance(error, ConfigError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any --KEY VALUE of the configuration can be given, too.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", default="configs/digits_cpu.yaml")
    parser.add_argument("--minutes", type=float, default=3.0, help="for which blows come")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of blows")
    parser.add_argument("--out", type=Path, default=Path("out/chaos"), help="is emptied first")
    return parser


def _bar() -> Progress:
    columns = ("{task.description:<24}", BarColumn(), "step {task.completed} of {task.total}")
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))


# Blows


def _endless(kinds: Sequence[str], random: Random) -> Iterator[str]:
    """Yield each kind once, then random kinds forever."""
    yield from kinds
    while True:
        yield random.choice(kinds)


class Blows:
    """Disturbs a run at random moments, with one kind of blow after another."""

    def __init__(self, kinds: Iterable[str], seed: int, num_ranks: int, duration_s: float) -> None:
        self.random, self.num_ranks, self.duration_s = Random(seed), num_ranks, duration_s
        self.kinds, self.given = iter(kinds), list[Blow]()
        self.next_s: float | None = None  # time of the next blow; None unless all ranks are running
        self.stopped: list[tuple[float, psutil.Process]] = []  # latest time to resume, and process

    def look(self, observer: Observer, agent: int) -> None:
        """Resume processes that have been stopped for long enough, and strike if it is time to."""
        now_s = observer.now_s
        for until_s, process in self.stopped[:]:
            if now_s >= until_s or observer.any_is_down:
                self.stopped.remove((until_s, process))
                _send(process, signal.SIGCONT)
        if not observer.all_run or now_s > self.duration_s:
            self.next_s = None
        elif self.next_s is None:
            self.next_s = now_s + self.random.uniform(*GAP_S)
        elif now_s >= self.next_s:
            self._strike(observer, agent)
            self.next_s = None

    def _strike(self, observer: Observer, agent: int) -> None:
        rank, kind = self.random.randrange(self.num_ranks), next(self.kinds, None)
        if kind is None:
            return
        self.given.append(Blow(kind, rank, observer.now_s, observer.step))
        victim = psutil.Process(agent) if kind == "agent" else observer.processes[rank]
        _send(victim, signal.SIGSTOP if kind in STOPPED_S else signal.SIGKILL)
        if kind in STOPPED_S:
            self.stopped.append((observer.now_s + STOPPED_S[kind], victim))


def _send(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):  # torchrun may have ended it already
        process.send_signal(number)


# The training


class TrainingFailedError(Exception):
    """A training run did not finish; the message names its log."""


class Chaos:
    """Trains one configuration several times, each time in a new folder.

    Attributes:
        starts: Number of times that torchrun had to be started for the last run.
    """

    def __init__(self, given: dict[str, str], num_ranks: int, out: Path) -> None:
        """Check the configuration, and empty the output folder.

        Raises:
            ConfigError: The configuration is wrong.
        """
        self.given, self.num_ranks, self.out = {**given, "num_gpus": str(num_ranks)}, num_ranks, out
        self.config, self.starts = config_of(self.given), 0
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)

    def train(self, name: str, bar: Progress, blows: Blows | None = None) -> None:
        """Train to the end; with ``blows``, disturb the run, and then draw what happened.

        Raises:
            TrainingFailedError: The run has failed, and another start would not help.
        """
        (self.out / name).mkdir()
        task, self.starts = bar.add_task(name, total=None), 0
        agent = self._start(name)
        observer = Observer(self.out / name, self._log(name), self.num_ranks, self.config.epochs)
        try:
            while (code := agent.poll()) != 0:
                if code is not None:
                    agent = self._start(name)
                self._check(name)
                observer.look(agent.pid)
                if blows:
                    blows.look(observer, agent.pid)
                text = f"{name}, {len(blows.given)} blows" if blows else name
                total = observer.num_steps or None
                bar.update(task, description=text, completed=observer.step, total=total)
                time.sleep(LOOK_S)
        finally:
            _end(agent, observer)
        if blows:
            draw_gantt(observer.spans, blows.given, self.out / "gantt.png")

    def _start(self, name: str) -> "subprocess.Popen[bytes]":
        """Start torchrun, which restarts workers itself; their output goes to the log."""
        self.starts += 1
        keys = {**self.given, "run_dir": str(self.out / name)}
        options = ("--standalone", f"--nproc-per-node={self.num_ranks}", "--max-restarts=1000")
        with open(self._log(name), "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options]
                + ["--monitor-interval=0.1", "-m", lessons.trainer()]
                + [f"--{key}={value}" for key, value in keys.items()],
                env={**environment(self.num_ranks), **os.environ},
                stdout=log,
                stderr=log,
            )

    def _log(self, name: str) -> Path:
        return self.out / f"{name}.log"

    def _check(self, name: str) -> None:
        """Raise an error if another start would not help."""
        left = self.out / name / "exit_code"
        code = left.read_text(encoding="utf-8").strip() if left.exists() else ""
        if code in HOPELESS or self.starts > MAX_STARTS:
            raise TrainingFailedError(f"the training says {code or 1}: see {self._log(name)}")

    def compare(self, blows: Blows) -> int:
        """Compare the last checkpoints of both runs, and report; return 0 if all bits are equal."""
        counts = Counter(blow.kind for blow in blows.given)
        kinds = ", ".join(f"{number} x {kind}" for kind, number in sorted(counts.items()))
        print(f"{len(blows.given)} blows ({kinds}); torchrun was started {self.starts} times")
        print(f"what happened: {self.out}/gantt.png")
        expected, state = (_last_state(self.out / name) for name in ("undisturbed", "disturbed"))
        if wrong := differences(expected, state):
            print(f"NOT EQUAL: {len(wrong)} values, such as {wrong[0]}")
            return 1
        print(f"equal bit for bit after step {state['step']:,}: {counted(expected)}")
        return 0


def _end(agent: "subprocess.Popen[bytes]", observer: Observer) -> None:
    """Kill all processes of a training run."""
    agent.kill()
    agent.wait()
    for process in observer.processes.values():
        _send(process, signal.SIGKILL)
    psutil.wait_procs([*observer.processes.values()], timeout=10)


def _last_state(run_dir: Path) -> dict[str, Any]:
    """Return the values of the newest checkpoint, or if ranks have their own, the files' bytes."""
    newest = max((run_dir / "checkpoints").glob("step-*"), default=None)
    if newest is None:
        raise TrainingFailedError(f"{run_dir} has no checkpoint")
    if (newest / "state.pt").exists():
        loaded = lessons.solution("checkpoint").load_checkpoint(run_dir / "checkpoints")
        return {"step": loaded.step, **loaded.state}
    step = int(newest.name.removeprefix("step-"))
    contents = {file.name: bytearray(file.read_bytes()) for file in newest.iterdir()}
    return {"step": step} | {
        name: torch.frombuffer(content, dtype=torch.uint8) for name, content in contents.items()
    }


if __name__ == "__main__":
    sys.exit(main())
