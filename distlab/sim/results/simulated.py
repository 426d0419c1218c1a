"""Options of a simulation, and its result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from distlab.sim.collectives.algorithms import ALGORITHMS
from distlab.sim.engine.faults import Faults
from distlab.sim.engine.trace import Trace
from distlab.sim.hardware.cluster import Cluster
from distlab.sim.hardware.costs import Costs
from distlab.sim.reporting.sites import Site
from distlab.sim.results.gpu_time import GpuTime

T = TypeVar("T")
Named = Mapping[str, Tensor]
P2P_ORDERS = ("free", "pair")
SEMANTICS = ("gloo", "nccl")


class StepOf(NamedTuple):
    """A step of one of a rank's optimizers, both counted from 0."""

    step: int
    optimizer: int


class Observer(Protocol):
    """Sees each optimizer step of each rank before it is taken."""

    def stepped(self, rank: int, at: StepOf, params: Named, site: Site) -> None:
        """Look at the parameters of a step by their names."""


@dataclass(frozen=True)
class Options:
    """Settings of a simulation.

    Attributes:
        algorithm: Algorithm of the built-in collectives, one of ALGORITHMS.
        eager_bytes: Largest size of a buffered send; with -1, every send waits for its recv, as on
            NCCL.
        p2p_order: "free" starts point-to-point operations when they are posted. "pair" runs those
            between the same two ranks one at a time unless they are batched, and ignores their
            tags, as on NCCL.
        is_strict: True to report operations that never matched and, except with "nccl" as
            semantics, which has hazards, buffers changed before their operations are done.
        is_sanitized: True to look for mistakes that end without an error; see ``sanitizer``.
        observer: Object that sees each optimizer step; see ``sanitizer.against``.
        seed: Seed of each rank's torch, ``random`` and numpy generators.
        has_devices: True to account for computation and memory; None to do so if the cluster
            describes its GPU.
        capacity_bytes: Memory of each GPU; None to take it from the cluster's description.
        overlap_cost: Seconds lost per second of computation during a collective of the same rank;
            see `engine.overlap`.
        has_events: True to keep every event, for pictures and traces. Without events, a message
            takes less memory, but only totals are known.
        faults: Faults to inject.
        semantics: "gloo": the host waits for communication, and all tensors are the GPU's. "nccl":
            communication and kernels run on streams, and tensors are where the program puts them.
        costs: Times of the host with "nccl".
        watchdog: Folder for flight recorder dumps with "nccl": a hang then ends as on GPUs, where
            torch's watchdog writes them after the timeout. "" for no dumps.
        given: Folders or files of the caller's own code. Reports and tracebacks skip this code and
            name the innermost line of the program outside it.
    """

    algorithm: str = "auto"
    eager_bytes: int = -1
    p2p_order: str = "free"
    is_strict: bool = False
    is_sanitized: bool = False
    observer: Observer | None = None
    seed: int = 0
    has_devices: bool | None = None
    capacity_bytes: int | None = None
    overlap_cost: float = 0.0
    has_events: bool = True
    faults: Faults = field(default_factory=Faults)
    semantics: str = "gloo"
    costs: Costs = field(default_factory=Costs)
    watchdog: str = ""
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"there is no algorithm {self.algorithm!r}; valid: {', '.join(ALGORITHMS)}"
            )
        if not 0 <= self.overlap_cost < inf:
            raise ValueError(
                f"overlap_cost must be 0 or more and finite, got {self.overlap_cost}: 0.15 is usual"
            )
        if self.semantics not in SEMANTICS:
            raise ValueError(
                f"there are no semantics {self.semantics!r}; valid: {', '.join(SEMANTICS)}"
            )
        if self.watchdog and self.semantics != "nccl":
            raise ValueError(f"watchdog {self.watchdog} needs nccl as semantics: gloo has none")
        if self.p2p_order not in P2P_ORDERS:
            raise ValueError(
                f"there is no p2p_order {self.p2p_order!r}; valid: {', '.join(P2P_ORDERS)}"
            )


@dataclass(frozen=True)
class Simulated(Generic[T]):
    """Outcome of a simulation: the result of each rank, and the trace."""

    results: list[T]
    trace: Trace
    seconds: float  # virtual time at which the last rank to finish ends
    cluster: Cluster
    options: Options
    flops: list[int]  # by rank; 0 without a GPU
    findings: list[str] = field(default_factory=list)  # of the sanitizer
    gpu_time: GpuTime | None = None  # with NCCL's semantics
