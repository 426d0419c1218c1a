"""Compare the simulator's NCCL model with published NCCL measurements.

    python benchmarks/fidelity.py        rewrites the tables of docs/fidelity.md

Each table lists the times that one source published for one collective on one machine, by message
size. For each collective, the simulator's constants were fitted to every second table in
alphabetical order; the other tables only serve as a check.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import median

from distlab.sim.collectives import nccl, protocols
from distlab.sim.hardware.cluster import Cluster
from distlab.util.text import bytes_text

FIGURES = Path(__file__).parent / "nccl_figures"
PAGE = Path(__file__).parents[1] / "docs/fidelity.md"
MIB, GIB = 2**20, 2**30
SHOWN = tuple(2**k for k in (20, 24, 26, 28, 30, 33, 35))
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather": lambda p: (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
    "broadcast": lambda p: 1.0,
}


@dataclass(frozen=True)
class Table:
    """One published table.

    Attributes:
        algorithm: Algorithm that NCCL was forced to use, or "auto".
        points: Pairs of size in bytes and time in seconds.
        is_fitted: True if the simulator's constants were fitted to this table.
    """

    source: str
    where: str
    machine: str
    nodes: int
    gpus_per_node: int
    collective: str
    algorithm: str
    cluster: Cluster
    points: tuple[tuple[int, float], ...]
    is_fitted: bool

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the GPUs that took part."""
        on_node = self.cluster.gpus_per_node
        return tuple(
            node * on_node + gpu for node in range(self.nodes) for gpu in range(self.gpus_per_node)
        )

    def way(self, num_bytes: int) -> protocols.Way:
        """Return the algorithm and protocol that the simulator chooses for a message size."""
        return protocols.cheapest(
            self.collective, self.algorithm, self.members, num_bytes, self.cluster
        )

    def errors(self, smallest: int = 0, largest: int = 2**60) -> list[float]:
        """Return the relative errors, predicted / published - 1, for sizes in a range."""
        return [
            simulated_s(self, num_bytes) / seconds - 1
            for num_bytes, seconds in self.points
            if smallest <= num_bytes <= largest
        ]


def tables() -> list[Table]:
    """Return the tables to compare; sources.csv says why the others are left out."""
    with (FIGURES / "sources.csv").open() as file:
        sources = {row["source"]: row for row in csv.DictReader(file) if row["use"] == "yes"}
    points: defaultdict[tuple[str, ...], list[tuple[int, float]]] = defaultdict(list)
    with (FIGURES / "figures.csv").open() as file:
        for row in csv.DictReader(file):
            source = sources.get(row["source"])
            if source and int(row["bytes"]) >= int(source["from_bytes"]):
                key = ("collective", "source", "algorithm", "nodes", "gpus_per_node")
                point = int(row["bytes"]), float(row["time_us"]) * 1e-6
                points[tuple(row[name] for name in key)].append(point)
    return [
        _table(key, sources[key[1]], points[key], is_fitted=index % 2 == 0)
        for _, of_collective in groupby(sorted(points), key=itemgetter(0))
        for index, key in enumerate(of_collective)
    ]


def _table(
    key: tuple[str, ...],
    source: dict[str, str],
    points: Iterable[tuple[int, float]],
    *,
    is_fitted: bool,
) -> Table:
    collective, name, algorithm, nodes, gpus_per_node = key
    cluster = _cluster(source["preset"], int(nodes), network_adds=source["network_adds"] == "yes")
    return Table(
        name,
        source["where"],
        source["preset"],
        int(nodes),
        int(gpus_per_node),
        collective,
        algorithm,
        cluster,
        tuple(sorted(points)),
        is_fitted,
    )


@cache
def _cluster(preset: str, nodes: int, *, network_adds: bool) -> Cluster:
    return replace(Cluster.preset(preset, nodes), network_adds=network_adds)


# The page


@dataclass(frozen=True)
class Goal:
    """An error bound that predictions in a range of sizes should meet."""

    text: str
    within: float
    on_one_node: bool
    smallest: int
    largest: int

    def points(self, of: Iterable[Table]) -> list[tuple[Table, int, float]]:
        """Return the points in the range, as (table, bytes, published seconds)."""
        return [
            (table, num_bytes, seconds)
            for table in of
            if (table.nodes == 1) == self.on_one_node
            for num_bytes, seconds in table.points
            if self.smallest <= num_bytes <= self.largest
        ]


GOALS = (
    Goal("one node, 16 MiB and more", 0.15, True, 16 * MIB, 2**60),
    Goal("one node, 1 MiB", 0.25, True, MIB, MIB),
    Goal("several nodes, 16 MiB and more", 0.20, False, 16 * MIB, 2**60),
)


def simulated_s(table: Table, num_bytes: int) -> float:
    """Return the time that the simulator predicts."""
    return table.way(num_bytes).seconds


def constant_s(table: Table, num_bytes: int) -> float:
    """Return a baseline prediction from the bandwidth of NVLink or of all NICs, without latency."""
    algorithm = "direct" if table.collective == "all_to_all" else "ring"
    pattern = nccl.pattern(table.collective, algorithm, table.members, table.cluster)
    return num_bytes * pattern.seconds()


def goal_rows(of: Sequence[Table]) -> list[str]:
    """Return table rows that show how well the simulator and the baseline meet each goal."""
    rows = []
    for goal in GOALS:
        for label, is_fitted, predict in (
            ("fitted", True, simulated_s),
            ("checked", False, simulated_s),
            ("checked, bandwidth alone", False, constant_s),
        ):
            points = goal.points(table for table in of if table.is_fitted == is_fitted)
            errors = [predict(table, num_bytes) / s - 1 for table, num_bytes, s in points]
            sizes = sorted(map(abs, errors))
            met = sum(size <= goal.within for size in sizes) / len(sizes)
            rows.append(
                f"| {goal.text} | {label} | {len(sizes)} | {goal.within:.0%} | {met:.0%} "
                f"| {median(sizes):.1%} | {sizes[-1]:.0%} | {median(errors):+.1%} |"
            )
    return rows


def table_row(table: Table) -> str:
    """Return a published table's row; its cells show the bus bandwidths, published / simulated."""
    factor = BUS_FACTORS[table.collective](len(table.members))
    cells = []
    for size in SHOWN:
        near = [point for point in table.points if abs(point[0] / size - 1) < 0.01]
        rates = (
            f"{factor * n / s / 1e9:.3g}" for n, t in near[:1] for s in (t, simulated_s(table, n))
        )
        cells.append(" / ".join(rates))
    forced = "" if table.algorithm == "auto" else f", {table.algorithm.replace('_', ' ')}"
    half = "fitted" if table.is_fitted else "checked"
    off = median(map(abs, table.errors(MIB)))
    return f"| {table.source}{forced} | {half} | {' | '.join(cells)} | {off:.0%} |"


def page() -> str:
    """Return the computed tables of docs/fidelity.md."""
    everything = tables()
    parts = [
        "| range | half | points | goal | within | median error | worst | bias |",
        "|---|---|---|---|---|---|---|---|",
        *goal_rows(everything),
    ]
    groups: defaultdict[tuple[str, str, int, int], list[Table]] = defaultdict(list)
    for table in everything:
        key = (table.machine, table.collective, table.nodes, table.gpus_per_node)
        groups[key].append(table)
    sizes = " | ".join(bytes_text(size) for size in SHOWN)
    for (machine, collective, nodes, gpus), members in sorted(groups.items()):
        parts += ["", f"**{machine}, {collective}, {nodes} x {gpus} GPUs**", ""]
        parts += [f"| source | half | {sizes} | error |", "|---|---|" + "---|" * (len(SHOWN) + 1)]
        parts += [table_row(table) for table in members]
    return "\n".join(parts)


def sources() -> str:
    """Return the table of sources, with the reason for each one that is not used."""
    with (FIGURES / "sources.csv").open() as file:
        rows = [
            f"| {row['source']} | {row['where']} | {'' if row['use'] == 'yes' else row['use']} |"
            for row in csv.DictReader(file)
        ]
    return "\n".join(["| source | where | not used because |", "|---|---|---|", *rows])


def written(text: str) -> str:
    """Return the page's text with its computed parts updated."""
    for name, part in (("tables", page()), ("sources", sources())):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{part}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
