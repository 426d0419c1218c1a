"""Simulated GPUs: how often a submission's lines make the host wait, and what is wrong on GPUs."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distlab.sim.reporting.report import place
from distlab.sim.results.gpu_time import GpuTime, HostWait

WRONG = "the results are right, but on GPUs this would be wrong:"
TITLE = "host syncs"
HEADINGS = ("task", "place", "waits in", "most times")
Places = dict[tuple[str, str], int]  # number of waits by place and operation


@dataclass
class OnGpus:
    """What the simulated GPUs of a test's worlds reported.

    Attributes:
        root: Folder of the submission. Waits at other lines are the grader's.
        hazards: Lines on what would be wrong on GPUs.
        syncs: Most waits of one rank in one world.
    """

    root: Path
    hazards: list[str] = field(default_factory=list)
    syncs: Places = field(default_factory=dict)

    def note(self, gpu_time: GpuTime) -> list[int]:
        """Note a world's hazards and waits; return each rank's number of waits."""
        self.hazards += gpu_time.wrong
        by_rank: list[Counter[tuple[str, str]]] = [Counter() for _ in gpu_time.ranks]
        for wait in filter(self._is_of_submission, gpu_time.host_waits):
            by_rank[wait.rank][place(wait.site), wait.reason] += wait.count
        merge(self.syncs, *by_rank)
        return [counts.total() for counts in by_rank]

    def _is_of_submission(self, wait: HostWait) -> bool:
        return Path(wait.site[0]).is_relative_to(self.root)


def merge(syncs: Places, *others: Places) -> None:
    """Keep the largest number at each place."""
    for counts in others:
        for key, count in counts.items():
            syncs[key] = max(count, syncs.get(key, 0))


def sync_rows(by_task: Mapping[str, Places]) -> Iterator[str]:
    """Yield a table of the places at which a rank's host waits for its GPU."""
    rows = [HEADINGS]
    for task, syncs in by_task.items():
        rows += [(task, *key, f"{syncs[key]:,}") for key in sorted(syncs)]
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    for row in rows:
        yield "".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
