"""Compare the all-reduces of Phases 1 and 3 with gloo's; measure the cost of a gloo message."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from distlab import chosen, launch
from distlab.bench import harness
from distlab.bench.contest import WHOSE, Lesson
from distlab.shared_memory import SharedMemory
from distlab.util.text import bytes_text, counted, seconds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from distlab.lessons import AllReduceTimes

# Phase 1: the table of task 1.8

TASKS_1 = ("1.6", "1.7", "1.8")
EXCHANGE = "exchange: no all-reduce, but one message sent while another one arrives"
SIZES_1_BYTES = (4, 4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)


def phase_1(ranks: int, repeats: int, impl: str, max_bytes: int, folder: Path | None) -> None:
    """Print the times of Phase 1's all-reduces, in µs and as multiples of the native all-reduce's.

    Args:
        ranks: Number of gloo ranks, two or more.
        repeats: Number of timed runs per size.
        impl: "solution" or "mine".
        max_bytes: Largest size; at least two are measured, because fitting a line needs two points.
        folder: Folder for the medians; None to save nothing.

    Raises:
        NotThereError: There are no solutions here, or one of the functions is a TODO.
        LearnerError: ``impl`` is "mine" outside the course's folder.
        LaunchError: A rank failed.
    """
    lesson = partial(chosen.lesson, chosen.find(impl, TASKS_1))
    sizes = [size for size in SIZES_1_BYTES if size <= max(max_bytes, SIZES_1_BYTES[1])]
    times, *_ = launch.run(_measure_phase_1, ranks, lesson, sizes, repeats, backend="gloo")
    native = times.seconds["native"]
    rows = [
        (f"{size:,}", *(_multiple(column[i], native[i]) for column in times.seconds.values()))
        for i, size in enumerate(times.sizes_bytes)
    ]
    harness.print_table(
        f"{ranks} gloo ranks: µs (times native), median of {repeats}",
        ("bytes", *(name.replace("_", " ") for name in times.seconds)),
        rows,
        EXCHANGE,
        str(times.fit),
    )
    results = {"ranks": ranks, "repeats": repeats, "impl": impl, "medians": asdict(times)}
    harness.save(folder, f"phase1_all_reduce_{ranks}_ranks", results)


def _measure_phase_1(lesson: Lesson, sizes_bytes: Sequence[int], repeats: int) -> AllReduceTimes:
    collectives = lesson("collectives")
    times: AllReduceTimes = collectives.measure_all_reduce(
        collectives.ALL_REDUCES, sizes_bytes, repeats=repeats
    )
    return times


def _multiple(seconds: float, native: float) -> str:
    return f"{seconds * 1e6:,.0f} ({seconds / native:.1f})"


# Phase 3: rings, trees and shared memory

TASKS_3 = ("3.2", "3.3", "3.4", "3.5")
GLOO, COPIED, REGISTERED = "gloo", "shared memory", "registered"
SIZES_BYTES = (2**16, 2**20, 2**22, 2**24, 100 * 2**20, 2**28)
WARM_UPS = 2
TIMEOUT_S = 3600.0  # long, because summing 256 MiB on 4 ranks takes minutes
AHEAD_S = 5e-4  # seconds until the common start: about as long as it takes to agree on it
TICKS = (0.1, 0.2, 0.5, 1, 2, 5)
PINGS, PING_BYTES = 50, (8, 2**22)
MEANING = """\
Medians, in parentheses as multiples of gloo's: below 1 is faster. All ranks start at one time, and
the last one to end counts. Registered: the tensors are in shared memory, and nothing is copied."""
AllReduce = Callable[[Tensor], object]


@dataclass(frozen=True)
class Times:
    """The measurements, identical on all ranks.

    Attributes:
        seconds: Seconds of each run, from the common start until the last rank has its sum, by
            contestant and by size in bytes.
        alpha_s, beta_s_per_byte: Costs of a gloo message between ranks 0 and 1.
    """

    seconds: dict[str, dict[int, list[float]]]
    alpha_s: float
    beta_s_per_byte: float

    def multiples(self, name: str) -> list[float]:
        """Return a contestant's median for each size, as a multiple of gloo's."""
        return [
            median(runs) / median(self.seconds[GLOO][size])
            for size, runs in self.seconds[name].items()
        ]

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row per contestant; cells have the median and, below it, the ratio to gloo's."""
        return [
            (
                name,
                *(
                    f"{seconds_text(median(runs))}\n({multiple:.2f})"
                    for runs, multiple in zip(by_size.values(), self.multiples(name), strict=True)
                ),
            )
            for name, by_size in self.seconds.items()
        ]

    def headings(self) -> list[str]:
        """Return the sizes as headings that fit into 80 columns."""
        sizes = (bytes_text(size) for size in self.seconds[GLOO])
        return ["", *(size.replace(".00 ", " ").replace(".0 ", " ") for size in sizes)]

    def message(self) -> str:
        """Return the cost of a message as text."""
        per_s = bytes_text(1 / self.beta_s_per_byte) if self.beta_s_per_byte > 0 else "?"
        return f"one message of gloo's: α = {seconds_text(max(0.0, self.alpha_s))}, 1/β = {per_s}/s"


def phase_3(ranks: int, repeats: int, impl: str, max_bytes: int, folder: Path | None) -> None:
    """Print the times of Phase 3's all-reduces; save JSON and a figure if there is a folder.

    Args, Raises: As for ``phase_1``; a wrong sum also raises LaunchError.
    """
    lesson = partial(chosen.lesson, chosen.find(impl, TASKS_3))
    sizes = [size for size in SIZES_BYTES if size <= max_bytes] or [SIZES_BYTES[0]]
    arguments = lesson, sizes, repeats
    times, *_ = launch.run(measure_on_rank, ranks, *arguments, backend="gloo", timeout_s=TIMEOUT_S)
    title = f"{counted(ranks, 'gloo rank')}, {counted(os.cpu_count() or 1, 'core')}"
    notes = (MEANING, WHOSE[impl], times.message())
    headings = times.headings()
    harness.print_table(
        f"{title}: median of {repeats}",
        headings,
        times.rows(),
        *notes,
        texts=range(len(headings)),
    )
    if folder:
        seconds = {
            name: {str(size): harness.quartiles(runs) for size, runs in by_size.items()}
            for name, by_size in times.seconds.items()
        }
        message = {"alpha_s": times.alpha_s, "beta_s_per_byte": times.beta_s_per_byte}
        run = {"ranks": ranks, "repeats": repeats, "impl": impl}
        results = {**run, "message": message, "seconds_by_bytes": seconds}
        harness.save(folder, f"phase3_all_reduce_{ranks}_ranks", results, _figure(times, title))


def measure_on_rank(lesson: Lesson, sizes_bytes: Sequence[int], repeats: int) -> Times:
    """Measure the contestants at one size after another; at each size, they take turns.

    Raises:
        ValueError: A sum is wrong.
    """
    contestants = _contestants(lesson, max(sizes_bytes) // torch.float32.itemsize)
    seconds: dict[str, dict[int, list[float]]] = {name: {} for name in contestants}
    for size in sizes_bytes:
        numel = size // torch.float32.itemsize
        cut = {name: (call, x[:numel]) for name, (call, x) in contestants.items()}
        for name, row in zip(cut, seconds_of(cut, repeats), strict=True):
            seconds[name][size] = row
    return Times(seconds, *_alpha_beta())


def _contestants(lesson: Lesson, numel: int) -> dict[str, tuple[AllReduce, Tensor]]:
    """Return all-reduces by name, each with the tensor that it sums."""
    rings, trees, x = lesson("ring_allreduce"), lesson("tree_allreduce"), torch.empty(numel)
    contestants: dict[str, tuple[AllReduce, Tensor]] = {
        GLOO: (dist.all_reduce, x),
        "ring": (rings.ring_all_reduce, x),
        "segmented ring": (rings.segmented_ring_all_reduce, x),
        "tree": (trees.tree_all_reduce, x),
        "two trees": (trees.double_binary_tree_all_reduce, x),
    }
    if sys.platform == "linux":
        shared = SharedMemory()
        contestants[COPIED] = shared.all_reduce, x
        contestants[REGISTERED] = shared.all_reduce, shared.buffer(numel)
    return contestants


def seconds_of(
    contestants: Mapping[str, tuple[AllReduce, Tensor]], repeats: int
) -> list[list[float]]:
    """Return the seconds that each run takes until the last rank has its sum.

    Raises:
        ValueError: A sum is wrong.
    """

    def start(name: str) -> float:
        contestants[name][1].fill_(1.0)
        return start_together()

    checked = {name: partial(_checked, name, *pair) for name, pair in contestants.items()}
    harness.in_turns(checked, WARM_UPS, start)
    runs = {name: partial(all_reduce, x) for name, (all_reduce, x) in contestants.items()}
    # All ranks start together, so the largest time is that of the last rank to finish.
    rows: list[list[float]] = harness.of_all_ranks(harness.in_turns(runs, repeats, start)).tolist()
    return rows


def _checked(name: str, all_reduce: AllReduce, x: Tensor) -> None:
    all_reduce(x)
    if not bool((x == dist.get_world_size()).all()):
        raise ValueError(f"{name}: rank {dist.get_rank()} has a wrong sum")


def start_together() -> float:
    """Wait until a time that all ranks agree on, and return it; ranks on a host share a clock."""
    dist.barrier()
    start_s = torch.tensor([perf_counter() + AHEAD_S], dtype=torch.float64)
    harness.of_all_ranks(start_s)
    while perf_counter() < start_s.item():
        sleep(0)  # yields, because there may be fewer cores than ranks
    return start_s.item()


def _alpha_beta() -> tuple[float, float]:
    """Return α and β of a message between ranks 0 and 1, which takes α + bytes · β seconds."""
    small_s, large_s = (_message_s(size) for size in PING_BYTES)
    beta = (large_s - small_s) / (PING_BYTES[1] - PING_BYTES[0])
    costs = torch.tensor([small_s - PING_BYTES[0] * beta, beta], dtype=torch.float64)
    dist.broadcast(costs, 0)
    alpha_s, beta_s_per_byte = costs.tolist()
    return alpha_s, beta_s_per_byte


def _message_s(num_bytes: int) -> float:
    """Return a message's median time on rank 0; the result on other ranks is meaningless."""
    ball, rank, seconds = torch.zeros(num_bytes, dtype=torch.uint8), dist.get_rank(), []
    first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
    for _ in range(PINGS if rank < 2 else 0):
        start_s = perf_counter()
        first(ball, 1 - rank)
        second(ball, 1 - rank)
        seconds.append((perf_counter() - start_s) / 2)
    dist.barrier()
    return median(seconds) if seconds else 0.0


def _figure(times: Times, title: str) -> Figure:
    """Draw each contestant's time as a multiple of gloo's, by size."""
    from matplotlib.figure import Figure

    from distlab import plot

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    plot.curves(
        axes,
        [size // 2**10 for size in times.seconds[GLOO]],
        {name: plot.Curve(times.multiples(name)) for name in times.seconds},
        title=f"all-reduce on {title}",
        xlabel="KiB on each rank",
        ylabel="time as a multiple of gloo's",
        yscale="log",
    )
    axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_yticks([], minor=True)
    return figure
