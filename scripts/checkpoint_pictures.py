"""Pictures of Phase 4's lessons on checkpoints, for ``scripts/figures.py``."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

from drawing import BLUE, FAINT, GREEN, PURPLE, RED, WHITE, WIDTH, box, canvas, write
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from solutions.phase4_production.checkpoint import load_checkpoint, save_checkpoint
from solutions.phase4_production.fault_tolerance import expected_duration_s, young_interval_s

# --- 4.8: how often to save -----------------------------------------------------------------------

WORK_S, RESTART_S, NODE_MTBF_S, NODES = 86_400, 300, 30 * 86_400, 1000  # the lesson's example
MAX_HOURS = 48  # the upper end of the picture
SAVES_S = {60.0: "#c0661a", 5.0: "#2f6db5"}  # duration of a save -> colour of its curve


def draw_intervals() -> Figure:
    """Draw how long a day of training takes with every interval, and Young's interval."""
    figure = Figure(figsize=(WIDTH / 72, 320 / 72), layout="constrained")
    axes = figure.subplots()
    intervals_s = [60 * 1.05**n for n in range(84)]
    for save_s, colour in SAVES_S.items():
        hours = {s / 60: _hours(s, save_s) for s in intervals_s}
        shown = {minutes: h for minutes, h in hours.items() if h < MAX_HOURS}
        axes.plot([*shown], [*shown.values()], color=colour, linewidth=2.5)
        young_s = young_interval_s(save_s, NODE_MTBF_S, NODES)
        best = young_s / 60, _hours(young_s, save_s)
        axes.plot(*best, "o", color=colour, markersize=9)
        text = f"save of {save_s:.0f} s: Young's\ninterval is {best[0]:.1f} min"
        look: dict[str, Any] = {
            "size": 14,
            "color": colour,
            "ha": "center",
            "textcoords": "offset points",
        }
        axes.annotate(text, best, (0, 26), **look)
    _label(axes)
    return figure


def _hours(interval_s: float, save_s: float) -> float:
    """Return how long the lesson's day of training takes, in hours."""
    return expected_duration_s(WORK_S, interval_s, save_s, RESTART_S, NODE_MTBF_S, NODES) / 3600


def _label(axes: Axes) -> None:
    """Label the axes; the one on the right shows the same as a share of useful time."""
    axes.set_xscale("log")
    ticks = (1, 2, 5, 10, 20, 30, 60)
    axes.set_xticks(ticks, map(str, ticks), size=14)
    axes.set_xticks([], minor=True)
    axes.set(xlim=(1, 60), ylim=(24, MAX_HOURS))
    hours = range(24, MAX_HOURS + 1, 6)
    axes.set_yticks(hours, map(str, hours), size=14)
    axes.set_xlabel("minutes of training between two saves", size=14)
    axes.set_ylabel("hours for a day of training", size=14)
    goodput = axes.twinx()
    percents = (100, 90, 80, 70, 60, 50)
    goodput.set(ylim=axes.get_ylim())
    goodput.set_yticks([2400 / p for p in percents], [f"{p} %" for p in percents], size=14)
    goodput.set_ylabel("goodput", size=14)
    for each in (axes, goodput):
        each.spines[["top"]].set_visible(False)
    axes.grid(color="#e3e8ed")


# --- 4.1: the steps of a save ---------------------------------------------------------------------


class Moment(NamedTuple):
    """The run's folder after a step of a save."""

    step: str  # such as "fsync state.pt"
    folder: str  # that is being saved
    is_named: bool  # whether this name is on the disk
    files: dict[str, str]  # in it: name -> "memory", "content", or "disk" if its name is there too
    after_kill: str  # what a load then finds
    after_power_cut: str


class _Watch:
    """Notes what a save has done after each of its steps."""

    def __init__(self, run: Path) -> None:
        self.run, self.moments = run, list[Moment]()
        self.safe: set[tuple[int, str]] = set()  # inode, and a name of it that is on the disk
        self.whole: set[int] = set()  # inodes of files whose content is on the disk
        self.fsync, self.rename = os.fsync, Path.rename

    def sync(self, descriptor: int) -> None:
        """Call ``os.fsync``; what came before it was a write, if it is a file."""
        path = self._path_of(descriptor)
        if path.is_file():
            self._note(f"write {path.name}")
        self.fsync(descriptor)
        if path.is_file():
            self.whole.add(path.stat().st_ino)
        else:
            self.safe.update((child.stat().st_ino, child.name) for child in path.iterdir())
        folder = "run's folder" if path == self.run else "new folder"
        name = path.name if path.is_file() else folder
        self._note(f"fsync {name}")

    def _path_of(self, descriptor: int) -> Path:
        """Return the path of an open file or folder."""
        paths = (self.run.parent, self.run, *self.run.rglob("*"))
        inode = os.fstat(descriptor).st_ino
        return next(path for path in paths if path.stat().st_ino == inode)

    def renamed(self, path: Path, target: Path) -> Path:
        """Rename a folder."""
        self.rename(path, target)
        self._note("rename")
        return target

    def _note(self, step: str) -> None:
        """Note the folder of step 400, if it is there, and what a load would find."""
        for folder in self.run.glob("*400*"):
            files = {file.name: self._state(file) for file in sorted(folder.iterdir())[::-1]}
            is_named = (folder.stat().st_ino, folder.name) in self.safe
            found = self._found(is_named=True), self._found(is_named)
            either = " or ".join(sorted(set(found)))
            self.moments.append(Moment(step, folder.name, is_named, files, found[0], either))

    def _state(self, file: Path) -> str:
        """Return how much of a file is on the disk."""
        inode = file.stat().st_ino
        if inode not in self.whole:
            return "memory"
        return "disk" if (inode, file.name) in self.safe else "content"

    def _found(self, is_named: bool) -> str:
        """Return the step that a load finds, with or without the folder of step 400."""
        with TemporaryDirectory() as other:
            ignored = [] if is_named else ["*400*"]
            copy = shutil.copytree(
                self.run, Path(other) / "run", ignore=shutil.ignore_patterns(*ignored)
            )
            loaded = load_checkpoint(copy)
        return str(loaded.step) if loaded else "nothing"


def run_save() -> list[Moment]:
    """Save step 400 beside step 300, and return what there was after each step of the save."""
    with TemporaryDirectory() as parent:
        run = Path(parent).resolve() / "run"
        save_checkpoint({"epoch": 3}, run, 300)
        watch = _Watch(run)
        with (
            patch("os.fsync", watch.sync),
            patch.object(Path, "rename", lambda path, target: watch.renamed(path, target)),
        ):
            save_checkpoint({"epoch": 4}, run, 400)
    return watch.moments


ROW, FOLDER, FILES, KILL, CUT = 40, 138, 270, 440, 518  # height of a row; where columns are
STATES = {"memory": WHITE, "content": BLUE, "disk": GREEN}


def draw_save() -> Figure:
    """Draw a row for each step of a save: what is on the disk, and what a load would find."""
    moments = run_save()
    top = 46
    figure, axes = canvas(height=top + len(moments) * ROW + 34)
    write(axes, 4, 26, "step", ha="left", bold=True)
    write(axes, FOLDER, 26, "the new folder", ha="left", bold=True)
    write(axes, (KILL + CUT) / 2, 10, "a load finds, after", bold=True)
    write(axes, KILL, 30, "a kill", size=13)
    write(axes, CUT, 30, "a power cut", size=13)
    for number, moment in enumerate(moments):
        _draw_moment(axes, top + number * ROW, moment)
    _draw_states(axes, top + len(moments) * ROW + 16)
    return figure


def _draw_moment(axes: Axes, y: float, moment: Moment) -> None:
    """Draw a row."""
    middle = y + ROW / 2 - 3
    write(axes, 4, middle, moment.step, ha="left", size=13)
    box(axes, FOLDER, y, 273, ROW - 6, dashed=not moment.is_named)
    name = moment.folder.replace("step-00000", "step-…")
    write(axes, FOLDER + 5, middle, name, ha="left", size=13)
    x = FILES
    for file, state in moment.files.items():
        text, is_in_memory = file.removesuffix(".json"), state == "memory"
        box(axes, x, y + 5, 66, ROW - 16, text, fill=STATES[state], dashed=is_in_memory, size=13)
        x += 70
    for x, found in ((KILL, moment.after_kill), (CUT, moment.after_power_cut)):
        write(axes, x, middle, found, size=14, bold=found == "400")


def _draw_states(axes: Axes, y: float) -> None:
    """Draw the legend."""
    texts = {
        "memory": "in memory only",
        "content": "content on disk",
        "disk": "content and name on disk",
    }
    for number, (state, text) in enumerate(texts.items()):
        x = 4 + number * 162
        box(axes, x, y - 6, 22, 14, fill=STATES[state], dashed=state == "memory")
        write(axes, x + 30, y, text, ha="left", size=13)


# --- 4.4: saves while training goes on ------------------------------------------------------------

COPY_S, SAVE_S, STEP_S, SHOWN_S = 0.7, 21.0, 5.0, 132.0  # the lesson's copy and save; a step


class Bar(NamedTuple):
    """What happens for a while on a lane: "step", "copy", "save" or "wait"."""

    lane: str
    kind: str
    begin_s: float
    end_s: float


def save_at_once(every: int) -> list[Bar]:
    """Return a training that stops for each save."""
    bars, now_s = list[Bar](), 0.0
    while now_s < SHOWN_S:
        bars.append(Bar("training", "step", now_s, now_s + STEP_S))
        now_s += STEP_S
        if sum(bar.kind == "step" for bar in bars) % every == 0:
            bars.append(Bar("training", "save", now_s, now_s + SAVE_S))
            now_s += SAVE_S
    return bars


def save_in_a_thread(every: int) -> list[Bar]:
    """Return a training that stops for each copy, and for a write that has not ended before it."""
    bars, now_s, free_s = list[Bar](), 0.0, 0.0
    while now_s < SHOWN_S:
        bars.append(Bar("training", "step", now_s, now_s + STEP_S))
        now_s += STEP_S
        if sum(bar.kind == "step" for bar in bars) % every == 0:
            begin_s = max(now_s, free_s)
            bars.append(Bar("training", "wait", now_s, begin_s))
            now_s, free_s = begin_s + COPY_S, begin_s + COPY_S + SAVE_S
            bars.append(Bar("training", "copy", begin_s, now_s))
            bars.append(Bar("thread", "save", now_s, free_s))
    return bars


CASES = {
    "save at once, every 6 steps": save_at_once(6),
    "with a thread, every 6 steps": save_in_a_thread(6),
    "with a thread, every 3 steps": save_in_a_thread(3),
}
KINDS = {"step": BLUE, "copy": RED, "save": PURPLE, "wait": WHITE}
BAR, TITLE, LANE = 22, 32, 28  # heights


def draw_async_saves() -> Figure:
    """Draw three trainings, each with its steps, and what is written beside them."""
    lanes = {name: list(dict.fromkeys(bar.lane for bar in bars)) for name, bars in CASES.items()}
    bottom = sum(TITLE + LANE * len(of_case) for of_case in lanes.values())
    figure, axes = canvas(height=bottom + 24)
    top = 0
    for name, bars in CASES.items():
        done = sum(bar.kind == "step" and bar.end_s <= SHOWN_S for bar in bars)
        write(axes, 4, top + 12, name, ha="left", bold=True)
        write(axes, WIDTH - 6, top + 12, f"{done} steps in {SHOWN_S:.0f} s", ha="right")
        top += TITLE
        for lane in lanes[name]:
            _draw_lane(axes, lane, [bar for bar in bars if bar.lane == lane], top - 4)
            top += LANE
    _draw_kinds(axes, bottom + 10)
    return figure


def _draw_lane(axes: Axes, name: str, bars: Sequence[Bar], y: float) -> None:
    """Draw a lane, up to the end of the time that is shown."""
    write(axes, 4, y + BAR / 2, name, ha="left", size=13, colour=FAINT)
    scale = (WIDTH - 76) / SHOWN_S
    for bar in bars:
        width = (min(bar.end_s, SHOWN_S) - bar.begin_s) * scale
        if width > 0:
            is_wait = bar.kind == "wait"
            x = 70 + bar.begin_s * scale
            box(axes, x, y, width, BAR, fill=KINDS[bar.kind], dashed=is_wait)


def _draw_kinds(axes: Axes, y: float) -> None:
    """Draw the legend."""
    texts = {"step": "step", "save": "save to disk", "copy": "copy to the CPU", "wait": "wait"}
    x = 70.0
    for kind, text in texts.items():
        box(axes, x, y - 7, 20, 14, fill=KINDS[kind], dashed=kind == "wait")
        write(axes, x + 28, y, text, ha="left", size=13)
        x += 60 + 7.5 * len(text)
