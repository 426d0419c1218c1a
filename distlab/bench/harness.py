"""Shared harness of all benchmarks: let contestants take turns, print a table, save a JSON record.

A contestant is a function. All contestants of a table run in the same process, in order in one
round and in reverse in the next, so that other load on the machine affects all of them. Ratios
are between medians of the same run.
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
    """Return the time immediately, so that a contestant starts without waiting."""
    return perf_counter()


def together(_name: str) -> float:
    """Wait until all ranks are ready to start a contestant, and return the time."""
    dist.barrier()
    return perf_counter()


def in_turns(
    contestants: Mapping[str, Callable[[], object]],
    repeats: int,
    start: Callable[[str], float] = now,
    after_round: Callable[[int, float], None] = lambda number, seconds: None,
) -> Tensor:
    """Time contestants in turns; return this rank's seconds per run, (contestants, repeats).

    The first round runs them in order, the second in reverse, and so on.

    Args:
        contestants: Functions by name; each call is one timed run.
        repeats: Number of rounds.
        start: Function that prepares a run, and returns the time that counts as its start.
        after_round: Callback that gets the number of a round, from 1, and its seconds.
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
    """Replace each element with its maximum over all ranks, in place; return the tensor."""
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine


def quartiles(numbers: Sequence[float]) -> dict[str, float]:
    """Return q1, the median and q3 of one or more numbers."""
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
    """Print a table with notes below it; outside a terminal, the table is as wide as necessary.

    Args:
        title: Line above the table.
        headings: Names of the columns.
        rows: Cells, one sequence for each row.
        notes: Paragraphs below the table.
        texts: Indices of columns with unwrapped text; the others have right-aligned numbers.
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
    """Write ``name.json``, and ``name.png`` if there is a figure; print their paths.

    Args:
        folder: Folder, created if it is missing; None to save nothing.
        name: Name of the files; existing ones are replaced.
        results: Measurements in JSON types, with units in their names.
        figure: Figure of the results.
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
    """Return the processor's name, or its architecture if the system does not give a name."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
