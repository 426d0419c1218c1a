"""Pictures of a simulated run, each a matplotlib Figure: ``figure.savefig("ring.svg")``.

space_time   the activities of each rank over time, with messages as arrows
gantt        the total time that each rank computed, waited and was idle
"""

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle, pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from distlab.sim.engine.trace import Event, departure_s, lanes
from distlab.sim.results.simulated import Simulated
from distlab.sim.results.summary import assumed, gpu_totals, label, settings, totals
from distlab.util.text import SECONDS, counted, unit_of

COMPUTE, WAIT, IDLE, MESSAGE, DEATH = "#3b6fb6", "#f2c9b0", "#e4e4e4", "#333333", "#c1121f"
ENDED, LATE, CUT_SHORT = "#f6f6f6", "#c9a227", "#f0b3b3"
# Parts of the time: name, attribute of the totals, and colour. Those of several streams add up.
PARTS = (
    ("compute", "compute_s", COMPUTE),
    ("exposed communication", "exposed_s", WAIT),
    ("idle", "idle_s", IDLE),
)
ON_GPUS = (
    ("GPU busy", "busy_s", COMPUTE),
    ("exposed communication", "exposed_s", WAIT),
    ("host late", "late_s", LATE),
)
# Activities of a waiting rank, with their colours.
WAITS = {
    "sending": "#6cb2d6",
    "receiving": "#9bcf9f",
    "sending and receiving": "#8f8fd6",
    "waiting": "#e2e2e2",
}
STATES = {  # (is sending, is receiving) -> activity
    (True, True): "sending and receiving",
    (True, False): "sending",
    (False, True): "receiving",
    (False, False): "waiting",
}
COLLECTIVES = ("#e6842a", "#4f9d69", "#8a5fbf", "#c9a227", "#d1495b", "#2a9d8f", "#8d6b4f")
CROWDED = 32  # with more ranks, messages are left out: the arrows would hide everything else
MARGIN = 0.22  # share of the time that is added on the right for the waits that were cut short
MANY = 500  # with more messages, the arrows are thinner
LEGEND_COLUMNS = 7
_ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderpad": 0}
_ARROW: dict[str, Any] = {"angles": "xy", "scale_units": "xy", "scale": 1, "units": "inches"}

Span = tuple[float, float]  # y range, relative to a lane's middle; y grows downward
Bar = tuple[int, float, float]  # (rank, start, end), in seconds
Interval = tuple[float, float]  # (start, end), in seconds


def space_time(
    simulated: Simulated[Any],
    title: str = "Space-time diagram",
    cut_short: Mapping[int, str] = MappingProxyType({}),
) -> Figure:
    """Draw a lane per rank over virtual time, with computation and waits as bars.

        rank 0  ██████╲░░░░░░░░   computes, sends, has ended
        rank 1  ░░░░░░░╲█████     waits, receives, computes

    Collectives are drawn below the bars, because they may overlap in time with computation. With
    more than 32 ranks, messages are left out.

    Args:
        simulated: The run.
        title: Title of the picture.
        cut_short: Operations for which ranks still waited when an error ended the run, by rank.
    """
    kinds: defaultdict[str, list[Event]] = defaultdict(list)
    for event in simulated.trace.events:
        kinds[event.kind].append(event)
    picture = _Lanes(simulated, title, lane_inches=0.5)
    bar, strip = picture.spans(with_strip=bool(kinds["collective"]))
    if simulated.gpu_time:
        picture.draw_bars("GPU busy", _busy(simulated), bar, COMPUTE)
    else:
        picture.draw_bars("computing", _bars(kinds["compute"]), bar, COMPUTE)
        for name, waits in _waits(simulated, kinds["wait"]).items():
            picture.draw_bars(name, waits, bar, WAITS[name])
    picture.draw_bars("ended", _ends(simulated), bar, ENDED)
    _draw_collectives(picture, kinds["collective"], strip)
    if not picture.is_crowded:
        picture.draw_messages((bar[0], strip[1]))
    picture.draw_deaths()
    picture.draw_cut_short(cut_short, bar)
    return picture.finished()


def gantt(simulated: Simulated[Any], title: str = "Where the time went") -> Figure:
    """Draw a bar per rank: computation, exposed communication, and idle time until the end."""
    picture = _Lanes(simulated, title, lane_inches=0.34)
    span, _ = picture.spans(with_strip=False)
    starts = [0.0] * len(simulated.results)
    ranks: Sequence[Any] = gpu_totals(simulated) if simulated.gpu_time else totals(simulated)
    for kind, field, colour in ON_GPUS if simulated.gpu_time else PARTS:
        lengths = [getattr(rank, field) for rank in ranks]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        all_bars = zip(range(len(starts)), starts, ends, strict=True)
        bars = [bar for bar in all_bars if bar[2] - bar[1] > 1e-4 * simulated.seconds]
        picture.draw_bars(kind, bars, span, colour)
        if not picture.is_crowded:
            picture.write_shares(bars)
        starts = ends
    return picture.finished()


def _waits(simulated: Simulated[Any], waits: Iterable[Event]) -> dict[str, list[Bar]]:
    """Split waits at the times when messages of the rank start or end, and sort them by activity.

    For example, a rank in ``send`` first waits until the other rank is in ``recv``, and then sends.
    """
    leaving: defaultdict[int, list[Interval]] = defaultdict(list)
    coming: defaultdict[int, list[Interval]] = defaultdict(list)
    for send, recv in simulated.trace.pairs():
        on_its_way = departure_s(send, recv), recv.end_s
        leaving[send.rank].append(on_its_way)
        coming[recv.rank].append(on_its_way)
    bars: dict[str, list[Bar]] = {name: [] for name in WAITS}
    for wait in waits:
        transfers = leaving[wait.rank], coming[wait.rank]
        for start, end in pairwise(_cuts(wait, chain(*transfers))):
            middle = (start + end) / 2
            is_sending, is_receiving = (_covers(intervals, middle) for intervals in transfers)
            bars[STATES[is_sending, is_receiving]].append((wait.rank, start, end))
    return bars


def _cuts(wait: Event, intervals: Iterable[Interval]) -> list[float]:
    """Return the start and end of a wait, and the times within it when messages start or end."""
    inside = {time for time in chain(*intervals) if wait.start_s < time < wait.end_s}
    return sorted({wait.start_s, wait.end_s, *inside})


def _covers(intervals: Iterable[Interval], time: float) -> bool:
    return any(start < time < end for start, end in intervals)


def _ends(simulated: Simulated[Any]) -> list[Bar]:
    """Return a bar for each rank, from its own end until the last rank to finish ends."""
    last = [0.0] * len(simulated.results)
    on_gpus = simulated.gpu_time.tracks if simulated.gpu_time else []
    for event in chain(simulated.trace.events, (event for _, event in on_gpus)):
        last[event.rank] = max(last[event.rank], event.end_s)
    ends = ((rank, start, simulated.seconds) for rank, start in enumerate(last))
    return [bar for bar in ends if bar[2] - bar[1] > 1e-4 * simulated.seconds]


def _busy(simulated: Simulated[Any]) -> list[Bar]:
    """Return when at least one stream of a rank computed or copied, in one bar if without pause."""
    assert simulated.gpu_time is not None
    kernels = (event for _, event in simulated.gpu_time.tracks if event.kind == "compute")
    bars: list[Bar] = []
    for rank, start, end in sorted(_bars(kernels)):
        if bars and bars[-1][0] == rank and start < bars[-1][2] + 1e-4 * simulated.seconds:
            rank, start, last = bars.pop()
            end = max(end, last)
        bars.append((rank, start, end))
    return bars


def _bars(events: Iterable[Event]) -> list[Bar]:
    return [(event.rank, event.start_s, event.end_s) for event in events]


def _draw_collectives(picture: "_Lanes", events: Iterable[Event], strip: Span) -> None:
    """Draw collectives in one colour per name, in several rows if they overlap on a rank."""
    by_rank: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_rank[event.rank].append(event)
    rows: defaultdict[tuple[str, int], list[Event]] = defaultdict(list)
    for of_rank in by_rank.values():
        for number, lane in enumerate(lanes(of_rank)):
            for event in lane:
                rows[event.name, number].append(event)
    height = (strip[1] - strip[0]) / max((number + 1 for _, number in rows), default=1)
    colours = dict(zip(dict.fromkeys(name for name, _ in rows), cycle(COLLECTIVES), strict=False))
    for (name, number), row in rows.items():
        top = strip[0] + number * height
        picture.draw_bars(name, _bars(row), (top, top + height), colours[name])


class _Lanes:
    """A picture with an empty lane per rank, an axis of virtual time, and the assumptions."""

    def __init__(self, simulated: Simulated[Any], title: str, lane_inches: float) -> None:
        self.simulated = simulated
        self.num_ranks = len(simulated.results)
        self.is_crowded = self.num_ranks > CROWDED
        unit, self._unit_s = unit_of(simulated.seconds, SECONDS)
        height = min(9.0, 2.1 + lane_inches * self.num_ranks)
        self._figure = Figure(figsize=(12, height), dpi=150, layout="constrained")
        self._figure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold")
        self._axes = self._figure.add_subplot()
        self._axes.set_xlim(0, 1.005 * simulated.seconds / self._unit_s or 1)
        self._axes.set_xlabel(f"virtual time ({unit})")
        self._axes.spines[["top", "right", "left"]].set_visible(False)
        self._name_lanes()

    def spans(self, *, with_strip: bool) -> tuple[Span, Span]:
        """Return the y ranges of a lane's bars, and of the strip for collectives below them."""
        edge = 0.5 if self.is_crowded else 0.38 if with_strip else 0.3
        if with_strip:
            return (-edge, 0.12), (0.12 if self.is_crowded else 0.16, edge)
        return (-edge, edge), (edge, edge)

    def draw_bars(self, name: str, bars: list[Bar], span: Span, colour: str) -> None:
        """Draw bars of one kind. White lines separate bars that are wide enough."""
        if not bars:
            return
        top, bottom = span
        scaled = [(rank, start / self._unit_s, end / self._unit_s) for rank, start, end in bars]
        corners = [
            [(start, rank + top), (end, rank + top), (end, rank + bottom), (start, rank + bottom)]
            for rank, start, end in scaled
        ]
        wide = np.inf if self.is_crowded else 0.006 * self._axes.get_xlim()[1]
        edges = ["white" if end - start > wide else colour for _, start, end in scaled]
        shapes = PolyCollection(corners, facecolor=colour, edgecolor=edges)
        shapes.set_linewidth(0.1 if self.is_crowded else 0.6)
        shapes.set_label(name)
        self._axes.add_collection(shapes, autolim=False)

    def draw_messages(self, lane: Span) -> None:
        """Draw an arrow per message, from the edge of one lane to the edge of the other."""
        arrows = []
        for send, recv in self.simulated.trace.pairs():
            leave, enter = reversed(lane) if recv.rank > send.rank else lane
            x, to_x = departure_s(send, recv) / self._unit_s, recv.end_s / self._unit_s
            arrows.append((x, send.rank + leave, to_x - x, recv.rank + enter - send.rank - leave))
        if not arrows:
            return
        self._axes.quiver(
            *zip(*arrows, strict=True),
            **_ARROW,
            headwidth=6,
            headlength=8,
            headaxislength=7,
            minlength=0,
            width=0.011 if len(arrows) <= MANY else 0.006,
            color=MESSAGE,
            zorder=3,
        )
        self._axes.plot([], [], color=MESSAGE, linewidth=1, marker=">", label="message")

    def draw_deaths(self) -> None:
        """Mark the times at which ranks were killed."""
        faults, trace = self.simulated.options.faults, self.simulated.trace
        killed = {**faults.kill_ranks, **trace.killed_in_step_s}
        if killed:
            when = [at_s / self._unit_s for at_s in killed.values()]
            self._axes.scatter(
                when, list(killed), marker="x", s=70, color=DEATH, zorder=4, label="killed"
            )

    def draw_cut_short(self, operations: Mapping[int, str], span: Span) -> None:
        """Write, behind the end of the time, for which operations ranks still waited."""
        if not operations:
            return
        end_s = self.simulated.seconds
        end, last_s = end_s / self._unit_s, (1 + MARGIN) * end_s or self._unit_s
        self._axes.set_xticks([time for time in self._axes.get_xticks() if time <= end])
        self._axes.set_xlim(0, last_s / self._unit_s)
        self._axes.axvline(end, color=DEATH, linewidth=1.2)
        bars = [(rank, end_s, last_s) for rank in operations]
        self.draw_bars("still waiting at the end", bars, span, CUT_SHORT)
        for rank in operations.keys() & self._named_ranks():
            place = (end, rank + sum(span) / 2)
            self._axes.annotate(f"  {operations[rank]}", place, va="center", fontsize=9)

    def write_shares(self, bars: list[Bar]) -> None:
        """Write percentages of the total time into bars that have room for them."""
        for rank, start, end in bars:
            share = (end - start) / self.simulated.seconds
            if share > 0.05:
                self._axes.annotate(
                    f"{share:.0%}",
                    ((start + end) / 2 / self._unit_s, rank),
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if start == 0 else MESSAGE,
                )

    def finished(self) -> Figure:
        """Add a label, the legend below it, and assumptions at the bottom; return the figure."""
        handles, names = self._axes.get_legend_handles_labels()
        entries = dict(zip(names, handles, strict=True))  # one entry for all rows of a collective
        self._axes.legend(
            entries.values(),
            entries,
            **_ABOVE,
            ncols=LEGEND_COLUMNS,
            frameon=False,
            fontsize=10,
        )
        rows = -(-len(entries) // LEGEND_COLUMNS)
        heading = [
            f"{label(self.simulated)}: {counted(self.num_ranks, 'rank')}",
            *settings(self.simulated.cluster, self.simulated.options),
        ]
        text = textwrap.fill(", ".join(heading), 150)
        self._axes.set_title(text, loc="left", fontsize=10, color="#555555", pad=8 + 17 * rows)
        self._print_assumptions()
        return self._figure

    def _print_assumptions(self) -> None:
        numbers = [line.partition(" (assumed")[0] for line in assumed(self.simulated)]
        if numbers:
            text = textwrap.fill(f"assumed: {', '.join(numbers)}", 150)
            self._figure.supxlabel(text, x=0.01, ha="left", fontsize=9, color="#666666")

    def _named_ranks(self) -> range:
        return range(0, self.num_ranks, -(-self.num_ranks // CROWDED))

    def _name_lanes(self) -> None:
        ranks = self._named_ranks()
        self._axes.set_ylim(self.num_ranks - 0.5, -0.5)
        self._axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
        self._axes.tick_params(axis="y", length=0, labelsize=10 if self.num_ranks <= 16 else 9)
        if not self.is_crowded and self.simulated.cluster.numbering == "block":
            per_node = self.simulated.cluster.gpus_per_node
            for rank in range(per_node, self.num_ranks, per_node):
                self._axes.axhline(rank - 0.5, color="#999999", linewidth=0.8, linestyle=":")
