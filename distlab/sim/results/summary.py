"""Summary of a simulated run: a table with the totals of each rank, and the assumptions."""

from collections.abc import Iterable, Sequence
from math import isclose
from statistics import median
from typing import Any, NamedTuple

from distlab.sim.results.simulated import Simulated
from distlab.util.text import bytes_text, counted, seconds_text

LISTED = 16  # with more ranks, only the spread and the slowest ranks are shown
SLOWEST = 3  # number of slowest ranks to show
BUSIEST = 3  # number of busiest links to list

HEADINGS = ("rank", "time", "compute", "exposed", "idle", "sent", "messages", "peak memory")


class Totals(NamedTuple):
    """Times and bytes of a rank: compute + exposed = time, and time + idle = the last rank's time.

    Attributes:
        time_s: Time until the rank's function returned, or until the rank was killed.
        exposed_s: Time that the rank spent waiting for communication.
        idle_s: Time between the rank's end and that of the last rank.
    """

    time_s: float
    compute_s: float
    exposed_s: float
    idle_s: float
    bytes_sent: float
    messages: float
    peak_bytes: float


def totals(simulated: Simulated[Any]) -> list[Totals]:
    """Return the total times and bytes of each rank."""
    trace = simulated.trace
    columns = (
        *(trace.compute_s, trace.exposed_s),
        *(trace.bytes_sent, trace.messages, trace.peak_bytes),
    )
    rows = []
    for compute_s, exposed_s, *counts in zip(*columns, strict=True):
        time_s = compute_s + exposed_s
        idle_s = 0.0 if isclose(time_s, simulated.seconds) else simulated.seconds - time_s
        rows.append(Totals(time_s, compute_s, exposed_s, idle_s, *counts))
    return rows


def summary(simulated: Simulated[Any], *, has_sources: bool = False) -> str:
    """Describe a run: the times, bytes and memory of each rank, and the assumptions.

        simulated, preset dgx-h100, not measured
        4 ranks on 1 x 8 GPUs (H100-80GB), rail-optimised: 38.4 µs

        rank     time  compute  exposed  idle      sent  messages  peak memory
           0  38.4 µs  4.07 µs  34.3 µs   0 s  6.00 MiB         6     5.00 MiB

    For more than 16 ranks, the table shows minimum, median and maximum, and the slowest ranks.

    Args:
        simulated: The run.
        has_sources: True to give the value and the source of each assumption.
    """
    ranks = totals(simulated)
    rows: list[tuple[str, ...]] = [HEADINGS]
    if len(ranks) <= LISTED:
        rows += [_row(str(rank), sums) for rank, sums in enumerate(ranks)]
    else:
        columns = list(zip(*ranks, strict=True))
        rows.append(_row("min", Totals(*map(min, columns))))
        rows.append(_row("median", Totals(*map(median, columns))))
        rows.append(_row("max", Totals(*map(max, columns))))
        rows += [_row(str(rank), ranks[rank]) for rank in _slowest(ranks)]
    parts = [[label(simulated), _size(simulated)], _table(rows), _details(simulated)]
    lines = assumed(simulated)
    parts += _listed("set:", settings(simulated))
    parts += _listed("assumed:", lines) if has_sources else [_in_one_line(lines)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def label(simulated: Simulated[Any]) -> str:
    """Return a label for tables and pictures: "simulated, preset dgx-h100, not measured"."""
    name = simulated.cluster.name
    cluster = "custom cluster" if name == "custom" else f"preset {name}"
    return f"simulated, {cluster}, not measured"


def assumed(simulated: Simulated[Any]) -> list[str]:
    """Return a line for each number in use that is neither from a data sheet nor measured."""
    lines = simulated.cluster.assumptions()
    if not any(simulated.trace.collectives):
        lines = [line for line in lines if not line.startswith("gpu.protocol")]
    if has_compute(simulated):
        return lines
    return ["computation takes no time"] + [line for line in lines if not line.startswith("gpu.")]


def has_compute(simulated: Simulated[Any]) -> bool:
    """Return whether computation took time."""
    return simulated.cluster.gpu is not None and simulated.options.has_devices is not False


def settings(simulated: Simulated[Any]) -> list[str]:
    """Return a line for each option that differs from its default, and for each fault."""
    options, faults = simulated.options, simulated.options.faults
    slowed = simulated.cluster.faults
    lines = [f"{pattern} is {factor:g} times slower" for pattern, factor in slowed]
    if options.algorithm != "auto":
        lines.append(f"built-in collectives: {options.algorithm}")
    if options.eager_bytes >= 0:
        lines.append(f"sends of up to {bytes_text(options.eager_bytes)} are buffered")
    if options.capacity_bytes is not None:
        lines.append(f"each GPU has {bytes_text(options.capacity_bytes)} of memory")
    if options.overlap_cost:
        lines.append(f"computation loses {options.overlap_cost:.0%} beside collectives")
    lines += [f"rank {rank} computes {f:g} times slower" for rank, f in faults.slow_ranks.items()]
    lines += [f"rank {rank} dies at {seconds_text(s)}" for rank, s in faults.kill_ranks.items()]
    lines += [f"rank {rank} dies in optimizer step {k}" for rank, k in faults.kill_at_steps.items()]
    lines += [
        f"messages from rank {src} to rank {dst} arrive {seconds_text(s)} late"
        for (src, dst), s in faults.delays_s.items()
    ]
    if faults.jitter_s:
        lines.append(f"every call starts up to {seconds_text(faults.jitter_s)} late")
    return lines


def _row(name: str, sums: Totals) -> tuple[str, ...]:
    times = (sums.time_s, sums.compute_s, sums.exposed_s, sums.idle_s)
    return (
        name,
        *map(seconds_text, times),
        bytes_text(sums.bytes_sent),
        f"{sums.messages:g}",
        bytes_text(sums.peak_bytes) if sums.peak_bytes else "-",
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def _slowest(ranks: Sequence[Totals]) -> list[int]:
    """Return the ranks that ended last; among ties, those that waited least come first."""
    return sorted(
        range(len(ranks)), key=lambda rank: (-round(ranks[rank].time_s, 9), ranks[rank].exposed_s)
    )[:SLOWEST]


def _size(simulated: Simulated[Any]) -> str:
    cluster = simulated.cluster
    gpu = f" ({cluster.gpu.name})" if cluster.gpu else ""
    return (
        f"{counted(len(simulated.results), 'rank')} on {cluster.nodes} x "
        f"{cluster.gpus_per_node} GPUs{gpu}, "
        f"{cluster.topology}: {seconds_text(simulated.seconds)}"
    )


def _details(simulated: Simulated[Any]) -> list[str]:
    """Return lines on the busiest links, unfinished operations, and the highest peak memory."""
    lines = []
    busiest = sorted(link_use(simulated), key=lambda use: -round(use[0], 6))[:BUSIEST]
    named = [f"{name} {share:.0%}" for share, name in busiest if share >= 0.005]
    if named:
        lines.append(f"busiest links: {', '.join(named)} of their capacity")
    trace = simulated.trace
    if trace.leftovers:
        lines += ["posted, but never matched by another rank:", *trace.leftovers]
    if trace.unwaited:
        lines += ["never waited for, so the tensor was never safe to use:", *trace.unwaited]
    fullest = max(range(len(trace.peak_bytes)), key=trace.peak_bytes.__getitem__)
    if trace.peak_bytes[fullest]:
        held = sorted(trace.peak_by_category[fullest].items(), key=lambda item: -item[1])
        parts = (f"{bytes_text(n)} {category.replace('_', ' ')}" for category, n in held if n)
        lines.append(f"peak memory of rank {fullest}: {', '.join(parts)}")
    return lines


def link_use(simulated: Simulated[Any]) -> Iterable[tuple[float, str]]:
    """Yield each link's utilisation, from 0 to 1, and its name."""
    for link, num_bytes in zip(simulated.cluster.links, simulated.trace.bytes_by_link, strict=True):
        capacity = link.bytes_per_s * simulated.trace.network_s
        yield (num_bytes / capacity if capacity else 0.0), link.name


def _in_one_line(lines: Sequence[str]) -> list[str]:
    names = [line.partition(" = ")[0] for line in lines]
    return [f"assumed: {', '.join(names)} (distlab sim --assumed says why)"] if names else []


def _listed(heading: str, lines: Sequence[str]) -> list[list[str]]:
    return [[heading, *(f"  {line}" for line in lines)]] if lines else []
