"""Pictures of Phase 4's lessons on failures, for ``scripts/figures.py``; each shows a real run."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from drawing import (
    BLUE,
    EMPTY,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    arrow,
    box,
    canvas,
    line,
    write,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from distlab.sim import SimulationError, simulate
from phase4_production.given import Health, Loaded
from solutions.phase4_production.elastic import run_elastic
from solutions.phase4_production.fault_tolerance import Heartbeat, HeartbeatMonitor

# --- 4.6: elastic training ------------------------------------------------------------------------


class Start(NamedTuple):
    """What torchrun starts: workers on some nodes, and what ends them."""

    nodes: Sequence[int]
    fails: tuple[int, int] | None = None  # the rank that fails, and the step in which it does
    stops_after: int | None = None  # the step after which SIGTERM ends the workers


STARTS = (Start((0, 1), fails=(1, 2)), Start((0,), stops_after=2), Start((0, 1, 2)))
LAST_STEP = 4


class Share(NamedTuple):
    """A rank's samples in a step; None if the rank failed."""

    start: int
    step: int
    rank: int
    samples: Sequence[int] | None


class _Lost(Exception):
    """The node of a rank is lost."""


class _Ledger:
    """A job that trains nothing, but records who would have trained on what."""

    def __init__(self, number: int, start: Start, shares: list[Share]) -> None:
        self.number, self.start, self.shares, self.num_steps = number, start, shares, 0
        self.parameter = torch.zeros(1)

    def parameters(self) -> Iterable[Tensor]:
        return [self.parameter]

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.num_steps = state["num_steps"]

    def add_gradients(self, samples: Sequence[int], epoch: int, /) -> None:
        here = dist.get_rank(), self.num_steps + 1
        is_lost = here == self.start.fails
        self.shares.append(Share(self.number, here[1], here[0], None if is_lost else samples))
        if is_lost:
            raise _Lost

    def step(self) -> None:
        self.num_steps += 1

    def stops(self) -> bool:
        return self.num_steps in (self.start.stops_after, LAST_STEP)


def run_starts() -> list[Share]:
    """Run the lesson's example with one more restart, on simulated ranks."""
    shares: list[Share] = []
    saved: list[Loaded] = []
    for number, start in enumerate(STARTS):
        with suppress(SimulationError):
            simulate(partial(_work, number, start, shares, saved), len(start.nodes))
    return shares


def _work(number: int, start: Start, shares: list[Share], saved: list[Loaded]) -> None:
    """Run a worker until it ends."""
    job, folder = _Ledger(number, start, shares), Path()
    with suppress(SystemExit):
        run_elastic(
            job,
            folder,
            num_samples=9,
            global_batch=4,
            num_epochs=2,
            save_every=1,
            micro_batch=4,
            save=lambda state, folder, step: saved.append(Loaded(step, state, folder, {})),
            load=lambda folder: saved[-1] if saved else None,
            should_stop=job.stops,
        )


STEP, LEFT, GAP = 82, 66, 46  # widths: of a step, left of the first, and between two starts
TOP, LANE, AGENT, TITLE, CELL = 50, 76, 10, 20, 28  # heights: above the lanes, and in a lane
LOST = "#f6cfc9"
LOST_AT = 0.7  # the part of its last step after which the node is lost


def draw_elastic() -> Figure:
    """Draw a lane for each node, with its agent and its workers, and the checkpoints below."""
    shares = run_starts()
    columns = _columns(shares)
    figure, axes = canvas(height=TOP + 3 * LANE + 76)
    for node in range(3):
        write(axes, 4, _top(node) + AGENT + TITLE, f"node {node}", ha="left", bold=True)
    for number, start in enumerate(STARTS):
        mine = {step: x for (at, step), x in columns.items() if at == number}
        _draw_start(axes, number, start, mine, shares)
    _draw_agents(axes, columns)
    _draw_checkpoints(axes, columns)
    return figure


def _columns(shares: Sequence[Share]) -> dict[tuple[int, int], float]:
    """Return the left end of each step of each start."""
    keys = sorted({(share.start, share.step) for share in shares})
    return {key: LEFT + n * STEP + key[0] * GAP for n, key in enumerate(keys)}


def _top(node: int) -> float:
    """Return the upper end of a node's lane."""
    return TOP + node * LANE


def _draw_start(
    axes: Axes, number: int, start: Start, columns: Mapping[int, float], shares: Sequence[Share]
) -> None:
    """Draw the workers of a start, each with its samples in every step."""
    left, width = min(columns.values()), STEP * len(columns)
    write(axes, left + width / 2, 14, f"WORLD_SIZE={len(start.nodes)}", bold=True)
    for step, x in columns.items():
        write(axes, x + STEP / 2, 36, f"step {step}", size=13, colour=FAINT)
    samples = {(s.step, s.rank): s.samples for s in shares if s.start == number}
    for rank, node in enumerate(start.nodes):
        y = _top(node) + AGENT
        box(axes, left, y, width, TITLE, f"RANK={rank}", fill=GREY)
        for step, x in columns.items():
            mine = samples.get((step, rank), [])
            is_lost = start.fails is not None and start.fails[1] == step
            fill = LOST if is_lost else BLUE if mine else "white"
            text = "✗" if mine is None else " ".join(map(str, mine)) or "–"
            box(axes, x, y + TITLE, STEP, CELL, text, fill=fill)


def _draw_agents(axes: Axes, columns: Mapping[tuple[int, int], float]) -> None:
    """Draw when each node has an agent; nodes that join wait while the others end a step."""
    lost, joins = columns[0, 2] + STEP * LOST_AT, columns[1, 2] + STEP * LOST_AT
    end = columns[2, 4] + STEP
    for node, x, until in ((0, LEFT, end), (1, LEFT, lost), (1, joins, end), (2, joins, end)):
        box(axes, x, _top(node), until - x, AGENT, fill=GREEN)
    write(axes, lost - 12, _top(2) - 8, "node 1 is lost", size=13, colour=RED)
    write(axes, joins - 8, _top(1) + 26, "two nodes", size=13)
    write(axes, joins - 8, _top(1) + 44, "wait", size=13)


def _draw_checkpoints(axes: Axes, columns: Mapping[tuple[int, int], float]) -> None:
    """Draw the checkpoint after each step, and from which of them each start goes on."""
    y = TOP + 3 * LANE + 8
    write(axes, 4, y + 12, "saved", ha="left", bold=True)
    saved = {key: x for key, x in columns.items() if key[1] != (STARTS[key[0]].fails or (0, 0))[1]}
    for (_, step), x in saved.items():
        box(axes, x + 2, y, STEP - 4, 24, f"after {step}", fill=PURPLE)
    for number, start in enumerate(STARTS[1:], start=1):
        last = max(x for (earlier, _), x in saved.items() if earlier < number) + STEP / 2
        first = min(x for (at, _), x in columns.items() if at == number)
        middle = _top(start.nodes[-1]) + AGENT + TITLE + CELL / 2
        line(
            axes, [last, last, first - 16, first - 16], [y + 24, y + 34, y + 34, middle], colour=INK
        )
        arrow(axes, (first - 17, middle), (first, middle), INK)
    for x, fill, text in (
        (0, GREEN, "torchrun's agent"),
        (165, BLUE, "trained on"),
        (295, LOST, "lost"),
    ):
        box(axes, LEFT + x, y + 48, 20, 12, fill=fill)
        write(axes, LEFT + x + 28, y + 54, text, ha="left", size=13)


# --- 4.5: heartbeats ------------------------------------------------------------------------------

STEP_S, TIMEOUT_S, END_S = 4.0, 6.0, 31.0  # of a step, and how long a monitor polls
WORK_S = (1.5, 1.5, 3.6)  # that a rank's own part of a step takes; rank 2 is slow
DIES_IN_STEP = 5  # rank 1
SHADES = {"alive": GREEN, "slow": ORANGE, "waiting": BLUE, "silent": "#e79c90"}


class Beat(NamedTuple):
    """A report, which ends a rank's own part of a step."""

    time_s: float
    rank: int
    step: int


def beats() -> list[Beat]:
    """Return the reports of three ranks, in order; rank 1 dies before its report of a step."""
    steps = range(1, DIES_IN_STEP + 1)
    reports = [Beat((n - 1) * STEP_S + WORK_S[r], r, n) for n in steps for r in range(3)]
    return sorted(beat for beat in reports if beat[1:] != (1, DIES_IN_STEP))


def polls() -> list[tuple[float, list[Health]]]:
    """Return what the solution's monitor finds, twice a second."""
    store, now_s = HashStore(), 0.0
    hearts = [Heartbeat(store, rank) for rank in range(3)]
    monitor = HeartbeatMonitor(store, 3, timeout_s=TIMEOUT_S, clock=lambda: now_s)
    coming, found = beats(), []
    for number in range(int(2 * END_S)):
        now_s = number / 2
        while coming and coming[0].time_s <= now_s:
            beat = coming.pop(0)
            hearts[beat.rank].beat(beat.step, WORK_S[beat.rank])
        found.append((now_s, monitor.poll()))
    return found


SECOND, BEATS_TOP, BEATS_LANE = 16.2, 30, 70  # points


def draw_heartbeats() -> Figure:
    """Draw each rank's work and reports, and under them what the monitor says about it."""
    bottom = BEATS_TOP + 3 * BEATS_LANE
    figure, axes = canvas(height=bottom + 26)
    for step in range(1, DIES_IN_STEP + 1):
        x = _at((step - 1) * STEP_S)
        line(axes, [x, x], [20, bottom - 8], colour=EMPTY)
        write(axes, x, 10, f"step {step}", ha="left", size=13, colour=FAINT)
    for beat in beats():
        width, y = WORK_S[beat.rank] * SECOND, BEATS_TOP + beat.rank * BEATS_LANE
        box(axes, _at(beat.time_s) - width, y, width, 22, fill=GREY)
        axes.plot(_at(beat.time_s), y + 11, "o", color=INK, markersize=8)
    dies_s = (DIES_IN_STEP - 1) * STEP_S
    box(axes, _at(dies_s), BEATS_TOP + BEATS_LANE, SECOND, 22, "✗", fill=LOST)
    for rank in range(3):
        write(axes, 4, BEATS_TOP + rank * BEATS_LANE + 26, f"rank {rank}", ha="left", bold=True)
        _draw_verdicts(axes, rank)
    box(axes, _at(0), bottom + 6, 24, 12, fill=GREY)
    write(axes, _at(0) + 32, bottom + 12, "own part of a step", ha="left", size=13)
    axes.plot(_at(11.4), bottom + 12, "o", color=INK, markersize=8)
    write(axes, _at(11.4) + 10, bottom + 12, "report", ha="left", size=13)
    return figure


def _at(time_s: float) -> float:
    """Return where a time is drawn."""
    return 62 + time_s * SECOND


def _draw_verdicts(axes: Axes, rank: int) -> None:
    """Draw a bar for each stretch of time in which the monitor says the same about a rank."""
    times = [(ranks[rank].status, now_s) for now_s, ranks in polls()]
    changes = [(status, min(s for _, s in some)) for status, some in groupby(times, itemgetter(0))]
    ends = [*(now_s for _, now_s in changes[1:]), END_S]
    y = BEATS_TOP + rank * BEATS_LANE + 28
    for (status, begin_s), end_s in zip(changes, ends, strict=True):
        width = (end_s - begin_s) * SECOND
        box(axes, _at(begin_s), y, width, 22, status, fill=SHADES[status])
