"""What the launching process and its ranks say to each other.

Bulk data goes through files of the world's own folder, so that no reader can be blocked by a rank
that stops in the middle of a message; the control socket carries single bytes that announce them.

    parent                     rank
    folder and number   ─────▶ reads spec.pickle
                        ◀───── STARTED   the process group is up
                        ◀───── REPORTED  rank-3.report is written
    RELEASE             ─────▶ all ranks have reported: close the process group and exit
"""

import enum
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distlab.sim import Cluster, Options

STARTED, REPORTED, RELEASE = b"S", b"D", b"R"


class Outcome(str, enum.Enum):
    """How a rank ended, by its own account."""

    OK = "ok"
    EXCEPTION = "exception"
    SECONDARY = "secondary"  # lost its connection to a rank that ended first
    EXIT = "exit"  # sys.exit
    OUT_OF_MEMORY = "oom"


@dataclass(frozen=True)
class SimulationSpec:
    """What the process of a simulated world is told besides."""

    num_ranks: int
    cluster: "Cluster | str | None"
    options: "Options | None"


@dataclass(frozen=True)
class Spec:
    """What every rank of a world is told before it starts."""

    world_size: int
    backend: str
    devices: tuple[str, ...]  # by rank: "cpu", "cuda:0"
    collective_timeout_s: float | None  # None: the default of torch.distributed
    payload: bytes  # cloudpickle of (fn, args)
    environ: dict[str, str]
    working_dir: str
    sys_path: tuple[str, ...]
    simulation: SimulationSpec | None = None  # then world_size is 1: the process of all ranks


@dataclass(frozen=True)
class Report:
    """A rank's own account of how it ended."""

    outcome: Outcome
    at_ns: int  # time.monotonic_ns, one clock for all processes of a machine
    result: bytes = b""  # cloudpickle of what fn returned
    headline: str = ""  # "ValueError: boom"
    traceback: str = ""  # innermost frame last, launcher frames left out
    modules: tuple[str, ...] = ()  # slow imports it made, to be made ahead next time


@dataclass(frozen=True)
class WorldFolder:
    """The files of one world."""

    path: Path

    @property
    def rendezvous(self) -> Path:
        return self.path / "rendezvous"

    @property
    def running(self) -> Path:
        """Of a simulated world: the rank that runs, and every rank's thread."""
        return self.path / "running"

    def write_spec(self, spec: Spec) -> None:
        (self.path / "spec.pickle").write_bytes(pickle.dumps(spec))

    def read_spec(self) -> Spec:
        spec: Spec = pickle.loads((self.path / "spec.pickle").read_bytes())
        return spec

    def write_report(self, rank: int, report: Report) -> None:
        self._report(rank).write_bytes(pickle.dumps(report))

    def read_report(self, rank: int) -> Report:
        report: Report = pickle.loads(self._report(rank).read_bytes())
        return report

    def stacks(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.stacks"

    def _report(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.report"
