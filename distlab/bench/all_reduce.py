"""The all-reduces of Phase 1 beside the library's own, and α and β of their messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from distlab import chosen, launch
from distlab.bench import saving
from distlab.grade.submission import Submission

if TYPE_CHECKING:
    from distlab.lessons import AllReduceTimes

TASKS = ("1.6", "1.7", "1.8")
EXCHANGE = "exchange: no all-reduce, but one message sent while another one arrives"
SIZES_BYTES = (4, 4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)


def print_table(
    ranks: int, repeats: int, impl: str, max_bytes: int, folder: Path | None = None
) -> None:
    """Measure and print; cells in microseconds, and as multiples of the native all-reduce.

    Args:
        ranks: two or more.
        repeats: timed runs of each size.
        impl: "solution" or "mine".
        max_bytes: larger sizes are left out, but for two: a line needs two points.
        folder: where to save the medians.

    Raises:
        NotThereError: there are no solutions here, or one of the functions is a TODO.
        LearnerError: ``impl`` is "mine" outside of the course's folder.
        LaunchError: a rank failed.
    """
    lessons = chosen.find(impl, TASKS)
    sizes = [size for size in SIZES_BYTES if size <= max(max_bytes, SIZES_BYTES[1])]
    times, *_ = launch.run(_measure_on_rank, ranks, lessons, sizes, repeats, backend="gloo")
    console = Console()
    console.print(_table(times, f"{ranks} gloo ranks: µs (times native), median of {repeats}"))
    console.print(EXCHANGE)
    console.print(times.fit)
    if folder:
        results = {"ranks": ranks, "repeats": repeats, "impl": impl, "medians": asdict(times)}
        saving.save(folder, f"phase1_all_reduce_{ranks}_ranks", results)


def _measure_on_rank(
    lessons: Submission, sizes_bytes: Sequence[int], repeats: int
) -> AllReduceTimes:
    collectives: Any = chosen.lesson(lessons, "collectives")
    times: AllReduceTimes = collectives.measure_all_reduce(
        collectives.ALL_REDUCES, sizes_bytes, repeats=repeats
    )
    return times


def _table(times: AllReduceTimes, title: str) -> Table:
    table = Table(title=title)
    for name in ("bytes", *times.seconds):
        table.add_column(name.replace("_", " "), justify="right")  # a space lets long names wrap
    table.columns[0].no_wrap = True
    for row, size in enumerate(times.sizes_bytes):
        native = times.seconds["native"][row]
        cells = (_cell(column[row], native) for column in times.seconds.values())
        table.add_row(f"{size:,}", *cells)
    return table


def _cell(seconds: float, native: float) -> str:
    return f"{seconds * 1e6:,.0f} ({seconds / native:.1f})"
