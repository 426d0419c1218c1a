"""What the tests share: comparing what came back, and telling on which rank it is wrong."""

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from sys import float_info
from typing import Any

from distlab.grade import Run
from distlab.sim import Cluster
from phase1.groups import MEMBERS

LATENCY_S, BYTE_S = 7e-6, 1 / 13e9
UNIFORM = Cluster(1, 8, latency_s=LATENCY_S, nvlink_bytes_per_s=1 / BYTE_S)  # all pairs alike


def rounds_of(run: Run, num_bytes: int) -> float:
    """How many messages of so many bytes, one after the other, take as long as the run."""
    return round(run.seconds / (LATENCY_S + num_bytes * BYTE_S), 2)


def distance(a: Any, b: Any) -> float:
    """The greatest difference between numbers at the same place; inf if the shapes differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return distance([a[key] for key in a], [b.get(key) for key in a])
    if isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str):
        if len(a) != len(b):
            return inf
        return max(map(distance, a, b), default=0.0)
    if isinstance(a, float) and isinstance(b, int | float):
        return abs(a - b) if abs(b) <= float_info.max and isfinite(a - b) else inf
    return 0.0 if a == b else inf


def is_close(a: Any, b: Any, tolerance: float = 1e-9) -> bool:
    """Whether numbers are equal but for rounding, and all else is equal."""
    return distance(a, b) <= tolerance


def same_loss(a: Any, b: Any) -> bool:
    """Whether losses or accuracies are equal but for rounding in float32, which may hold them."""
    return is_close(a, b, 1e-6)


def of_members(run: Run) -> list[Any]:
    """The results of the ranks of the group in a run of ``inside_group``."""
    return [run.results[member] for member in MEMBERS]


def short(value: Any) -> str:
    """Write a value in at most a line."""
    text = repr(value)
    return text if len(text) <= 70 else f"{text[:68]} …"
