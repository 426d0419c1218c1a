"""Observe a training run from outside, and chart the states of its ranks and every ``Blow``."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from matplotlib.figure import Figure
from matplotlib.patches import Patch

COLOURS = {  # state of a rank -> colour
    "starting": "#e3c567",
    "training": "#3b6fb6",
    "evaluating": "#6fb07f",
    "stopped": "#b05a9c",
    "down": "#e6e6e6",
}
MARKS = {  # marker and legend text of each kind of ``Blow``
    "kill": ("X", "killed (SIGKILL)"),
    "stop": ("s", "stopped (SIGSTOP) until others gave up"),
    "pause": ("P", "stopped for a moment"),
    "agent": ("v", "torchrun killed"),
}
STEP, EPOCH = re.compile(r"^step ([\d,]+) of ([\d,]+) "), re.compile(r"^epoch \d+ of ")


@dataclass
class Span:
    """An interval that a rank spends in one state, in seconds since the observer began."""

    state: str
    begin_s: float
    end_s: float


class Observer:
    """Records the states of the ranks on each call of ``look``.

    A rank is "down" if it has no process, "stopped" if its process was sent SIGSTOP, "starting"
    until its first heartbeat, "evaluating" from the last step of an epoch until the accuracy is
    printed, and "training" the rest of the time.

    Attributes:
        spans: Intervals by rank, without gaps.
        step, num_steps: Latest step in the log, and the total number of steps that the log states.
        processes: Latest process of each rank, dead or alive.
    """

    def __init__(self, run_dir: Path, log: Path, num_ranks: int, num_epochs: int) -> None:
        """Start observing; ``log`` is the file with the output of the training run."""
        self.run_dir, self.num_epochs = run_dir, num_epochs
        self.log, self.offset = log, 0
        self.begun_s, self.is_evaluating = time.monotonic(), False
        self.step = self.num_steps = 0
        self.spans: list[list[Span]] = [[] for _ in range(num_ranks)]
        self.processes: dict[int, psutil.Process] = {}
        self.known: set[int] = set()
        self.beats_before = [0] * num_ranks  # last heartbeat before each rank's process began

    @property
    def now_s(self) -> float:
        """Seconds since the observer began."""
        return time.monotonic() - self.begun_s

    @property
    def all_run(self) -> bool:
        """True if all ranks were training or evaluating at the last look."""
        return all(spans and spans[-1].state in ("training", "evaluating") for spans in self.spans)

    @property
    def any_is_down(self) -> bool:
        """True if a rank had no process at the last look."""
        return any(spans and spans[-1].state == "down" for spans in self.spans)

    def look(self, agent: int) -> None:
        """Record the states of the ranks started by torchrun, whose process id is ``agent``."""
        self._find(agent)
        self._read()
        for rank, spans in enumerate(self.spans):
            state, now_s = self._state(rank), self.now_s
            if spans:
                spans[-1].end_s = now_s
            if not spans or spans[-1].state != state:
                spans.append(Span(state, now_s, now_s))

    def _find(self, agent: int) -> None:
        """Read the rank of each new process from its environment."""
        try:
            children = psutil.Process(agent).children()
        except psutil.NoSuchProcess:
            return
        for child in (child for child in children if child.pid not in self.known):
            try:
                rank = child.environ().get("RANK", "")
            except psutil.Error:
                continue
            if rank:  # otherwise it is not a torchrun worker yet
                self.processes[int(rank)] = child
                self.beats_before[int(rank)] = self._last_beat_ns(int(rank))
                self.known.add(child.pid)

    def _read(self) -> None:
        """Read the lines that were logged since the last look."""
        with open(self.log, encoding="utf-8") as log:
            log.seek(self.offset)
            lines = log.readlines()
            self.offset = log.tell()
        for line in lines:
            if match := STEP.match(line):
                self.step, self.num_steps = (int(text.replace(",", "")) for text in match.groups())
                self.is_evaluating = self.step % (self.num_steps // self.num_epochs) == 0
            elif EPOCH.match(line):
                self.is_evaluating = False

    def _state(self, rank: int) -> str:
        process = self.processes.get(rank)
        try:
            status = process.status() if process else psutil.STATUS_DEAD
        except psutil.NoSuchProcess:
            status = psutil.STATUS_DEAD
        if not process or status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
            return "down"
        if status == psutil.STATUS_STOPPED:
            return "stopped"
        if self._last_beat_ns(rank) == self.beats_before[rank]:
            return "starting"
        return "evaluating" if self.is_evaluating else "training"

    def _last_beat_ns(self, rank: int) -> int:
        """Return the time of a rank's last heartbeat, or 0 if there was none.

        Compare it only with earlier heartbeats, not with the start time of a process, which is
        known only to within about a second.
        """
        heartbeat = self.run_dir / f"heartbeat.rank{rank}"
        return heartbeat.stat().st_mtime_ns if heartbeat.exists() else 0


# The picture


class Blow(NamedTuple):
    """One disturbance of a rank; the kind "agent" hits torchrun itself, and so all ranks."""

    kind: str
    rank: int
    at_s: float
    step: int


def draw_gantt(spans: Sequence[Sequence[Span]], blows: Sequence[Blow], path: Path) -> None:
    """Draw a row of states over time for each rank, with a mark for each blow."""
    figure = Figure(figsize=(13, 1.6 + 0.55 * len(spans)), layout="constrained")
    axes = figure.subplots()
    for rank, row in enumerate(spans):
        bars = [(span.begin_s, span.end_s - span.begin_s) for span in row]
        colours = [COLOURS[span.state] for span in row]
        axes.broken_barh(bars, (rank - 0.35, 0.7), facecolors=colours)
    for blow in blows:
        if blow.kind == "agent":
            axes.axvline(blow.at_s, color="black", linestyle=":", linewidth=1)
        row_of_mark = -0.62 if blow.kind == "agent" else blow.rank
        marker, _ = MARKS[blow.kind]
        axes.plot(blow.at_s, row_of_mark, marker, color="black", markeredgecolor="white", ms=9)
    axes.set_yticks(range(len(spans)), [f"rank {rank}" for rank in range(len(spans))])
    axes.set(xlabel="seconds", ylim=(len(spans) - 0.5, -0.9))
    axes.spines[["top", "right", "left"]].set_visible(False)
    _legend(figure, {blow.kind for blow in blows})
    figure.savefig(path, dpi=120)


def _legend(figure: Figure, kinds: set[str]) -> None:
    """Add a legend for the colours and for the marks that were drawn."""
    states = [Patch(color=colour, label=state) for state, colour in COLOURS.items()]
    axes = figure.axes[0]
    marks = [
        axes.plot([], [], marker, color="black", label=text)[0]
        for kind, (marker, text) in MARKS.items()
        if kind in kinds
    ]
    figure.legend(handles=[*states, *marks], loc="outside upper center", ncols=9, frameon=False)
