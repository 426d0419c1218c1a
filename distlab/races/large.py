"""The open task of Phase 1: a learner's all-reduce of 16 MiB against the built-in ones.

check    the sum is right on every rank, and only messages are used; both are checked on small
         worlds and in every timed run
time     virtual seconds for 16 MiB on a few clusters of random shapes and speeds
score    geometric mean, over the clusters, of the time of recursive doubling divided by the
         learner's time
"""

import random
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from distlab import launch
from distlab.course import Challenge
from distlab.grade.submission import Submission
from distlab.races import standings
from distlab.races.standings import RIVALS, YOURS, ChallengeError, Standings, Wrong, between
from distlab.sim import Cluster, Options
from distlab.util.text import counted

NUM_BYTES = 16 * 2**20
BASELINE = "recursive_doubling"
NODES, GPUS = (1, 2, 3, 4), (2, 3, 4, 5, 8)  # drawn together, with at most MAX_RANKS GPUs
MAX_RANKS = 16
NVLINK_BYTES_PER_S = (10e9, 300e9)
NIC_SHARE = (0.02, 0.5)  # network bandwidth relative to bandwidth inside a node
LATENCY_S = (2e-6, 50e-6)
SMALL_WORLDS = ((1, 5), (2, 1), (3, 8), (5, 1003), (8, 64))  # (ranks, elements)


def race(
    handed_in: Submission, challenge: Challenge, numbers: random.Random, num_clusters: int
) -> tuple[Standings, ...]:
    """Check the function, then time it and its rivals on ``num_clusters`` random clusters.

    Raises:
        ChallengeError: A result is wrong, a rank failed or hung, or a collective was called.
    """
    yours_s = partial(checked_s, handed_in, challenge)
    for num_ranks, num_elements in SMALL_WORLDS:
        yours_s(num_elements, Cluster(1, num_ranks))
    clusters = [drawn(numbers) for _ in range(num_clusters)]
    seconds = {name: tuple(rival_s(name, cluster) for cluster in clusters) for name in RIVALS}
    seconds[YOURS] = tuple(yours_s(NUM_BYTES // 4, cluster) for cluster in clusters)
    shapes = tuple(f"{c.nodes}x{c.gpus_per_node} GPUs" for c in clusters)
    return (Standings("", shapes, seconds, BASELINE),)


def drawn(numbers: random.Random) -> Cluster:
    """Draw a cluster of 2 to 16 ranks, with log-uniform speeds and latencies."""
    nodes = numbers.choice(NODES)
    gpus = numbers.choice([count for count in GPUS if nodes * count <= MAX_RANKS])
    inside = between(numbers, NVLINK_BYTES_PER_S)
    latency_s = between(numbers, LATENCY_S)
    return Cluster(
        nodes,
        gpus,
        nics_per_node=1,
        nvlink_bytes_per_s=inside,
        nic_bytes_per_s=inside * between(numbers, NIC_SHARE),
        latency_s=latency_s,
        net_latency_s=2 * latency_s,
    )


def rival_s(algorithm: str, cluster: Cluster) -> float:
    """Return the virtual seconds that a built-in all-reduce takes."""
    options = Options(algorithm=algorithm)
    return launch.simulate(built_in, cluster.num_gpus, cluster=cluster, options=options).seconds


def built_in() -> None:
    """Run a rival on one rank, with meta tensors, so that nothing is computed."""
    dist.all_reduce(torch.empty(NUM_BYTES // 4, device="meta"))


def checked_s(
    handed_in: Submission, challenge: Challenge, num_elements: int, cluster: Cluster
) -> float:
    """Check the learner's function; return the virtual seconds that it takes on a cluster.

    Raises:
        ChallengeError: The sum on this cluster is wrong, or was not computed with messages only.
    """
    sizes = counted(num_elements, "number")
    run = standings.simulated(handed_in, challenge, summed, (num_elements,), cluster, sizes)
    if any(run.trace.collectives):
        raise ChallengeError(
            "it calls a built-in collective. Use messages: dist.send, dist.recv, dist.isend, "
            "dist.irecv, dist.batch_isend_irecv, and your own functions made of them."
        )
    for rank, wrong in enumerate(run.results):
        standings.refuse_wrong(rank, wrong, cluster.num_gpus, num_elements)
    return run.seconds


def summed(lesson: Any, function: str, num_elements: int) -> Wrong | None:
    """Run one rank: sum, then return the first wrong element; None if all are right."""
    x = standings.numbers_of_rank(num_elements, dist.get_rank())
    getattr(lesson, function)(x)
    return standings.first_wrong(x, dist.get_world_size())
