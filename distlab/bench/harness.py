"""The one harness of all measurements: contestants in turns, one table printer, one JSON record.

A contestant is a function. All contestants of a table run in the same process, forwards in one
round and backwards in the next, so that other load on the machine slows all of them. A ratio is
one of medians of the same run.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from distlab.launch.limits import num_cores
from distlab.util import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CPU_INFO = Path("/proc/cpuinfo")
QUARTILES = ("q1", "median", "q3")


# Running


def now(_name: str) -> float:
    """Start a contestant at once."""
    return perf_counter()


def together(_name: str) -> float:
    """Start a contestant on all ranks when the last rank is ready."""
    dist.barrier()
    return perf_counter()


def in_turns(
    contestants: Mapping[str, Callable[[], object]],
    repeats: int,
    start: Callable[[str], float] = now,
    after_round: Callable[[int, float], None] = lambda number, seconds: None,
) -> Tensor:
    """Return this rank's seconds (contestants, repeats); every second round is in reverse order.

    Args:
        contestants: Functions by name; each call is one timed run.
        repeats: Number of rounds.
        start: Function that prepares a run, and returns the time that counts as its start.
        after_round: Callback for the number of a round, from 1, and its seconds.
    """
    seconds = torch.zeros(len(contestants), repeats, dtype=torch.float64)
    in_order = list(enumerate(contestants.items()))
    for repeat in range(repeats):
        for row, (name, run) in in_order[:: -1 if repeat % 2 else 1]:
            start_s = start(name)
            run()
            seconds[row, repeat] = perf_counter() - start_s
        after_round(repeat + 1, float(seconds[:, repeat].sum()))
    return seconds


def of_all_ranks(mine: Tensor) -> Tensor:
    """Return the largest value of any rank, element by element."""
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine


def quartiles(numbers: Sequence[float]) -> dict[str, float]:
    """Return q1, median and q3 of at least one number."""
    cuts = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    values = torch.tensor(numbers, dtype=torch.float64).quantile(cuts).tolist()
    return dict(zip(QUARTILES, values, strict=True))


# Printing


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *notes: str,
    texts: Sequence[int] = (0,),
    **style: Any,
) -> None:
    """Print a table and notes below it; in a file, a table is as wide as necessary.

    Args:
        title: Line above the table.
        headings: Names of the columns.
        rows: Cells, one sequence for each row.
        notes: Paragraphs below the table.
        texts: Columns with unwrapped text; the others have right-aligned numbers.
        style: Options of rich's ``Table``.
    """
    table = Table(title=title or None, **style)
    for place, heading in enumerate(headings):
        is_text = place in texts
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=is_text)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        needed = console.measure(table, options=console.options.update(width=1000)).maximum
        console.width = max(console.width, needed)
    console.print(table)
    for note in notes:
        print(note)


# Saving


def save(
    folder: Path | None, name: str, results: Mapping[str, object], figure: Figure | None = None
) -> None:
    """Write ``name.json``, and ``name.png`` for a figure; print their paths.

    Args:
        folder: Folder, created if it is missing; None to save nothing.
        name: Name of the files; existing ones are replaced.
        results: Measurements in types of JSON, with units in their names.
        figure: Picture of them.
    """
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{name}.json"]
    record = {"benchmark": name, "machine": machine(), **results}
    files.write_whole(written[0], f"{json.dumps(record, indent=2)}\n".encode())
    if figure is not None:
        written.append(folder / f"{name}.png")
        figure.savefig(written[1], dpi=120)
    for path in written:
        print(f"saved: {path}")


def machine() -> dict[str, object]:
    """Describe the machine: processor, system and versions."""
    return {
        "processor": _processor(),
        "cores": num_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    """Return the processor's name, or its architecture where the system does not know the name."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
