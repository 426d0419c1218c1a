"""Summary of a simulated run: a table with the totals of each rank, and the assumptions."""

from collections.abc import Collection, Iterable, Sequence
from math import isclose
from statistics import median
from typing import Any, NamedTuple

from distlab.sim.hardware.cluster import Cluster
from distlab.sim.results.gpu_time import SYNC_HEADINGS, GpuTime
from distlab.sim.results.simulated import Options, Simulated
from distlab.util.text import bytes_text, counted, seconds_text

LISTED = 16  # with more ranks, only the spread and the slowest ranks are shown
SLOWEST = 3  # number of slowest ranks to show
BUSIEST = 3  # number of busiest links to list

SYNCS = 10  # number of host syncs to list

TRAFFIC = ("sent", "messages", "peak memory")
HEADINGS = ("rank", "time", "compute", "exposed", "idle", *TRAFFIC)
GPU_HEADINGS = (
    *("rank", "time", "GPU busy", "exposed", "host late", "host waits", "idle"),
    *TRAFFIC,
)


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


class GpuTotals(NamedTuple):
    """As ``Totals``, with NCCL's semantics, where GPUs work while their hosts run ahead.

    Attributes:
        time_s: Time until the rank's function returned, and its GPUs were done.
        busy_s: Time of all kernels and copies.
        exposed_s: Time for which the default stream waited for communication.
        late_s: Time for which streams had no work, because the host was late.
        waits_s: Time for which the host waited for the GPU.
        idle_s: Time between the rank's end and that of the last rank.
    """

    time_s: float
    busy_s: float
    exposed_s: float
    late_s: float
    waits_s: float
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


def gpu_totals(simulated: Simulated[Any]) -> list[GpuTotals]:
    """Return the total times and bytes of each rank with NCCL's semantics."""
    assert simulated.gpu_time is not None
    return [
        GpuTotals(sums.time_s, *times[:4], *sums[3:])
        for sums, times in zip(totals(simulated), simulated.gpu_time.ranks, strict=True)
    ]


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
    on_gpus = simulated.gpu_time
    ranks: Sequence[Any] = gpu_totals(simulated) if on_gpus else totals(simulated)
    rows: list[tuple[str, ...]] = [GPU_HEADINGS if on_gpus else HEADINGS]
    if len(ranks) <= LISTED:
        rows += [_row(str(rank), sums) for rank, sums in enumerate(ranks)]
    else:
        columns, of = list(zip(*ranks, strict=True)), type(ranks[0])
        rows.append(_row("min", of(*map(min, columns))))
        rows.append(_row("median", of(*map(median, columns))))
        rows.append(_row("max", of(*map(max, columns))))
        rows += [_row(str(rank), ranks[rank]) for rank in _slowest(ranks)]
    parts = [[label(simulated), _size(simulated)], _table(rows), _details(simulated)]
    if on_gpus:
        parts += _on_gpus(on_gpus, simulated.options.costs.launch_s)
    lines = assumed(simulated)
    parts += _listed("set:", settings(simulated.cluster, simulated.options))
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
    if simulated.gpu_time:
        lines += simulated.options.costs.lines()
    if has_compute(simulated):
        return lines
    return ["computation takes no time"] + [line for line in lines if not line.startswith("gpu.")]


def has_compute(simulated: Simulated[Any]) -> bool:
    """Return whether computation took time."""
    return simulated.cluster.gpu is not None and simulated.options.has_devices is not False


def settings(cluster: Cluster, options: Options) -> list[str]:
    """Return a line for each option that differs from its default, and for each fault."""
    faults, slowed = options.faults, cluster.faults
    lines = [f"{pattern} is {factor:g} times slower" for pattern, factor in slowed]
    if options.semantics != "gloo":
        lines.append("hosts run ahead of their GPUs, whose streams communicate, as with NCCL")
        lines += options.costs.changed()
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


def _on_gpus(on_gpus: GpuTime, launch_s: float) -> list[list[str]]:
    """Return the host's waits, what keeps the GPUs from their work, and what is wrong."""
    rows = on_gpus.sync_rows()
    parts = [["host syncs: none; no host has waited for its GPU"]]
    if not any(times.num_kernels for times in on_gpus.ranks):
        parts = [["no GPU has computed or copied anything"]]
    elif rows:
        shown = _table([SYNC_HEADINGS, *rows[:SYNCS]], left=(0, 1, 5))
        if len(rows) > SYNCS:
            shown.append(f"and {counted(len(rows) - SYNCS, 'more place')}")
        heading = "host syncs: there the host waits for the GPU, which may then run out of work"
        parts = _listed(heading, shown)
        parts += _listed("what helps where a line waits again and again:", on_gpus.sync_remedies())
    if sentence := on_gpus.bottleneck(launch_s):
        parts.append([sentence])
    return [*parts, *(_listed("wrong on GPUs:", on_gpus.wrong))]


def _row(name: str, sums: Totals | GpuTotals) -> tuple[str, ...]:
    times = [sums[place] for place, field in enumerate(sums._fields) if field.endswith("_s")]
    return (
        name,
        *map(seconds_text, times),
        bytes_text(sums.bytes_sent),
        f"{sums.messages:g}",
        bytes_text(sums.peak_bytes) if sums.peak_bytes else "-",
    )


def _table(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Return rows as lines of columns, which are aligned right, except those in ``left``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _slowest(ranks: Sequence[Totals | GpuTotals]) -> list[int]:
    """Return the ranks that ended last; among ties, those that waited least come first."""
    return sorted(
        range(len(ranks)), key=lambda rank: (-round(ranks[rank].time_s, 9), ranks[rank].exposed_s)
    )[:SLOWEST]


def _size(simulated: Simulated[Any]) -> str:
    cluster = simulated.cluster
    slots = f"GPUs ({cluster.gpu.name})" if cluster.gpu else "processes"
    return (
        f"{counted(len(simulated.results), 'rank')} on {cluster.nodes} x "
        f"{cluster.gpus_per_node} {slots}, "
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
    if trace.waited_twice:
        lines += [
            "waited for twice; on gloo, the second wait() waits for another message until the time "
            "limit:",
            *trace.waited_twice,
        ]
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
