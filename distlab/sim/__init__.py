"""Simulate a cluster: run unmodified ``torch.distributed`` programs on up to 1024 virtual GPUs.

def program() -> float:
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()

simulated = simulate(program, 8, cluster="dgx-h100")
simulated.results, simulated.seconds, simulated.trace.bytes_sent

    rank       a thread with a virtual clock; only the one whose clock is earliest runs
    device     a rank's virtual GPU, which times its operations and tracks its memory
    cluster    GPUs, and the links between them, in a topology
    message    a send or a recv, which waits in the mailbox for its counterpart
    meeting    one collective call of a group, open until all of its ranks have joined
    flow       bytes in transit, which share links with other flows
    fault      a disturbance to inject: a slow rank or link, a rank that dies, a delay
    trace      the history: events with virtual times, bytes and messages per rank
"""

from distlab.sim.engine.faults import Faults
from distlab.sim.engine.trace import Event, Trace
from distlab.sim.hardware.cluster import GPU, PRESETS, Cluster, choose_cluster
from distlab.sim.isolation.patches import unwaited
from distlab.sim.reporting.errors import (
    BlockedCall,
    Deadlock,
    Mismatch,
    RankError,
    SimulationError,
)
from distlab.sim.results.simulated import Options, Simulated
from distlab.sim.session import Lap, Session
from distlab.sim.simulation import simulate

__all__ = [
    "GPU",
    "PRESETS",
    "BlockedCall",
    "Cluster",
    "Deadlock",
    "Event",
    "Faults",
    "Lap",
    "Mismatch",
    "Options",
    "RankError",
    "Session",
    "Simulated",
    "SimulationError",
    "Trace",
    "choose_cluster",
    "simulate",
    "unwaited",
]
