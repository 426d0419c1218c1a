"""Saving results: a JSON file with the figures and the machine that they are of, and a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from distlab.util import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CPU_INFO = Path("/proc/cpuinfo")
QUARTILES = ("q1", "median", "q3")


def save(
    folder: Path, name: str, results: Mapping[str, object], figure: Figure | None = None
) -> None:
    """Write ``name.json``, and ``name.png`` if there is a figure, and print their paths.

    Args:
        folder: made if it is missing.
        name: of the files, which are replaced.
        results: what was measured, in types that JSON has; units are in the names.
        figure: a picture of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{name}.json"]
    whole = {"benchmark": name, "machine": machine(), **results}
    files.write_whole(written[0], f"{json.dumps(whole, indent=2)}\n".encode())
    if figure is not None:
        written.append(folder / f"{name}.png")
        figure.savefig(written[1], dpi=120)
    for path in written:
        print(f"saved: {path}")


def machine() -> dict[str, object]:
    """Return what a figure depends on besides the program: processor, system and versions."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": _processor(),
        "cores": usable,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    """Return the processor's name; where Linux doesn't tell it, its architecture."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def quartiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return q1, median and q3 of what was measured, one number or more."""
    cuts = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    found = torch.tensor(seconds, dtype=torch.float64).quantile(cuts).tolist()
    return dict(zip(QUARTILES, found, strict=True))
