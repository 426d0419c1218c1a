"""The all-reduces of Phase 3 and the one in shared memory beside gloo's, on one host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from distlab import chosen, launch
from distlab.bench import rivals, saving
from distlab.grade.submission import Submission
from distlab.shared_memory import SharedMemory
from distlab.util.text import bytes_text, counted, seconds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASKS = ("3.3", "3.4", "3.5", "3.6")
GLOO, COPIED, REGISTERED = "gloo", "shared memory", "registered"
SIZES_BYTES = (2**16, 2**20, 2**22, 2**24, 100 * 2**20, 2**28)
WARM_UPS = 2
TIMEOUT_S = 3600.0  # 256 MiB on 4 ranks need minutes
AHEAD_S = 5e-4  # how far ahead ranks agree to start: about as long as agreeing takes
TICKS = (0.1, 0.2, 0.5, 1, 2, 5)
PINGS, PING_BYTES = 50, (8, 2**22)
MEANING = """\
Medians, in parentheses as multiples of gloo's: below 1 is faster. All ranks start at one time, and
the last one to end counts. Registered: the tensors are in shared memory, and nothing is copied."""

AllReduce = Callable[[Tensor], object]


@dataclass(frozen=True)
class Times:
    """What was measured, equal on all ranks.

    Attributes:
        seconds: contestant -> size in bytes -> of each run, from the common start until the last
            rank has its sum.
        alpha_s, beta_s_per_byte: of a message of gloo's between ranks 0 and 1.
    """

    seconds: dict[str, dict[int, list[float]]]
    alpha_s: float
    beta_s_per_byte: float


def print_table(
    ranks: int, repeats: int, impl: str, max_bytes: int, folder: Path | None = None
) -> None:
    """Measure and print; with a folder, also save a JSON file and a picture there.

    Args:
        ranks: two or more.
        repeats: timed runs of each size.
        impl: "solution" or "mine".
        max_bytes: larger sizes are left out.
        folder: where to save.

    Raises:
        NotThereError: there are no solutions here, or one of the functions is a TODO.
        LearnerError: ``impl`` is "mine" outside of the course's folder.
        LaunchError: a rank failed, or a sum is wrong.
    """
    lessons = chosen.find(impl, TASKS)
    sizes = [size for size in SIZES_BYTES if size <= max_bytes] or [SIZES_BYTES[0]]
    arguments = lessons, sizes, repeats
    times, *_ = launch.run(measure_on_rank, ranks, *arguments, backend="gloo", timeout_s=TIMEOUT_S)
    title = f"{counted(ranks, 'gloo rank')}, {counted(os.cpu_count() or 1, 'core')}"
    Console().print(_table(times, f"{title}: median of {repeats}"))
    print(MEANING, rivals.WHOSE[impl], _message(times), sep="\n")
    if folder:
        results = {"ranks": ranks, "repeats": repeats, "impl": impl, **_results(times)}
        name = f"phase3_all_reduce_{ranks}_ranks"
        saving.save(folder, name, results, _figure(times, title))


def measure_on_rank(lessons: Submission, sizes_bytes: Sequence[int], repeats: int) -> Times:
    """Measure all contestants, size after size and in turn.

    Raises:
        ValueError: a sum is wrong.
    """
    largest = max(sizes_bytes) // torch.float32.itemsize
    contestants = _contestants(lessons, largest)
    seconds: dict[str, dict[int, list[float]]] = {name: {} for name in contestants}
    for size in sizes_bytes:
        numel = size // torch.float32.itemsize
        cut = {name: (call, x[:numel]) for name, (call, x) in contestants.items()}
        for name, row in zip(cut, _seconds(cut, repeats), strict=True):
            seconds[name][size] = row
    return Times(seconds, *_alpha_beta())


def _contestants(lessons: Submission, numel: int) -> dict[str, tuple[AllReduce, Tensor]]:
    """Return by name an all-reduce and the memory that it sums."""
    rings: Any = chosen.lesson(lessons, "ring_allreduce")
    trees: Any = chosen.lesson(lessons, "tree_allreduce")
    x = torch.empty(numel)
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


def _seconds(
    contestants: Mapping[str, tuple[AllReduce, Tensor]], repeats: int
) -> list[list[float]]:
    """Return the seconds of each run; every second time the last contestant goes first."""
    seconds = torch.zeros(len(contestants), WARM_UPS + repeats, dtype=torch.float64)
    in_turn = list(enumerate(contestants.items()))
    for run in range(WARM_UPS + repeats):
        for row, (name, (all_reduce, x)) in in_turn[:: -1 if run % 2 else 1]:
            x.fill_(1.0)
            start_s = _start_together()
            all_reduce(x)
            seconds[row, run] = perf_counter() - start_s
            if not bool((x == dist.get_world_size()).all()):
                raise ValueError(f"{name}: rank {dist.get_rank()} has a wrong sum")
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # the start was the same, so this is the last end
    rows: list[list[float]] = seconds[:, WARM_UPS:].tolist()
    return rows


def _start_together() -> float:
    """Return on all ranks at a time that they have agreed on; the ranks of a host share a clock."""
    dist.barrier()
    start_s = torch.tensor([perf_counter() + AHEAD_S], dtype=torch.float64)
    dist.all_reduce(start_s, dist.ReduceOp.MAX)
    while perf_counter() < start_s.item():
        sleep(0)  # there may be fewer cores than ranks
    return start_s.item()


def _alpha_beta() -> tuple[float, float]:
    """Measure a message between ranks 0 and 1: seconds = α + bytes · β."""
    small_s, large_s = (_message_s(size) for size in PING_BYTES)
    beta = (large_s - small_s) / (PING_BYTES[1] - PING_BYTES[0])
    found = torch.tensor([small_s - PING_BYTES[0] * beta, beta], dtype=torch.float64)
    dist.broadcast(found, 0)
    alpha_s, beta_s_per_byte = found.tolist()
    return alpha_s, beta_s_per_byte


def _message_s(num_bytes: int) -> float:
    """Return the median of one message; on ranks other than 0 nothing useful."""
    ball, rank, seconds = torch.zeros(num_bytes, dtype=torch.uint8), dist.get_rank(), []
    there, back = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
    for _ in range(PINGS if rank < 2 else 0):
        start_s = perf_counter()
        there(ball, 1 - rank)
        back(ball, 1 - rank)
        seconds.append((perf_counter() - start_s) / 2)
    dist.barrier()
    return median(seconds) if seconds else 0.0


def _medians(times: Times, name: str) -> dict[int, float]:
    return {size: median(runs) for size, runs in times.seconds[name].items()}


def _table(times: Times, title: str) -> Table:
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    gloos = _medians(times, GLOO)
    for size in gloos:
        whole = bytes_text(size).replace(".00 ", " ").replace(".0 ", " ")  # short, for 80 columns
        table.add_column(whole, justify="right", no_wrap=True)
    for name in times.seconds:
        cells = (
            f"{seconds_text(found)}\n({found / gloos[size]:.2f})"
            for size, found in _medians(times, name).items()
        )
        table.add_row(name, *cells)
    return table


def _message(times: Times) -> str:
    per_s = bytes_text(1 / times.beta_s_per_byte) if times.beta_s_per_byte > 0 else "?"
    return f"one message of gloo's: α = {seconds_text(max(0.0, times.alpha_s))}, 1/β = {per_s}/s"


def _results(times: Times) -> dict[str, object]:
    """Return what the JSON file holds: quartiles by contestant and size."""
    seconds = {
        name: {str(size): saving.quartiles(runs) for size, runs in by_size.items()}
        for name, by_size in times.seconds.items()
    }
    message = {"alpha_s": times.alpha_s, "beta_s_per_byte": times.beta_s_per_byte}
    return {"message": message, "seconds_by_bytes": seconds}


def _figure(times: Times, title: str) -> Figure:
    """Draw each contestant's time as a multiple of gloo's, by size."""
    from matplotlib.figure import Figure

    from distlab import plot

    gloos = _medians(times, GLOO)
    named = {
        name: plot.Curve([found / gloos[size] for size, found in _medians(times, name).items()])
        for name in times.seconds
    }
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    plot.curves(
        axes,
        [size // 2**10 for size in gloos],
        named,
        title=f"all-reduce on {title}",
        xlabel="KiB on each rank",
        ylabel="time as a multiple of gloo's",
        yscale="log",
    )
    axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_yticks([], minor=True)
    return figure
