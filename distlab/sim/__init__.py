"""A simulated cluster: unmodified ``torch.distributed`` programs on 2 to 1024 virtual GPUs.

def program() -> float:
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()

simulated = simulate(program, 8, cluster="dgx-h100")
simulated.results, simulated.seconds, simulated.trace.bytes_sent
"""

from distlab.sim.cluster import GPU, PRESETS, Cluster
from distlab.sim.errors import (
    BlockedCall,
    Deadlock,
    Mismatch,
    RankError,
    SimulationError,
)
from distlab.sim.faults import Faults
from distlab.sim.handles import unwaited
from distlab.sim.options import Options, Simulated, choose_cluster
from distlab.sim.simulation import simulate
from distlab.sim.trace import Event, Trace

__all__ = [
    "GPU",
    "PRESETS",
    "BlockedCall",
    "Cluster",
    "Deadlock",
    "Event",
    "Faults",
    "Mismatch",
    "Options",
    "RankError",
    "Simulated",
    "SimulationError",
    "Trace",
    "choose_cluster",
    "simulate",
    "unwaited",
]
