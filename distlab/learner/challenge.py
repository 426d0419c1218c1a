"""The open task of a phase: a learner's all-reduce against the built-in ones, on drawn clusters.

check    the sum on every rank, by messages alone: on small worlds, and in every run that is timed
time     16 MiB on a few clusters whose shape and speeds are drawn, in virtual seconds
stand    the geometric mean, over the clusters, of the time of recursive doubling over one's own
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distlab
from distlab import launch
from distlab.course import Challenge
from distlab.grade import submission
from distlab.grade.outcomes import verdict_on
from distlab.grade.running import on_rank
from distlab.grade.submission import Submission
from distlab.launch import LaunchError
from distlab.learner.folder import CourseFolder, LearnerError
from distlab.sim import Cluster, Options, Simulated
from distlab.words import counted

NUM_BYTES = 16 * 2**20
BASELINE = "recursive_doubling"
RIVALS = (BASELINE, "tree", "halving_doubling", "ring", "hierarchical")  # see Options.algorithm
NODES, GPUS = (1, 2, 3, 4), (2, 3, 4, 5, 8)  # up to 32 ranks
MAX_RANKS = 16
NVLINK_BYTES_PER_S = (10e9, 300e9)
NIC_SHARE = (0.02, 0.5)  # of the bandwidth inside a node
LATENCY_S = (2e-6, 50e-6)
SMALL_WORLDS = ((1, 5), (2, 1), (3, 8), (5, 1003), (8, 64))  # ranks, elements
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Standings:
    """Seconds of everybody on every cluster: ``seconds["yours"][0]`` on the first."""

    clusters: tuple[Cluster, ...]
    seconds: Mapping[str, tuple[float, ...]]

    def speedup(self, name: str) -> float:
        """How many times as fast as recursive doubling: geometric mean over the clusters."""
        pairs = zip(self.seconds[BASELINE], self.seconds[name], strict=True)
        return prod(base / own for base, own in pairs) ** (1 / len(self.clusters))


class ChallengeError(Exception):
    """What was handed in is not an all-reduce by messages; the text says why."""


def run(
    folder: CourseFolder, challenge: Challenge, impl: str, seed: int, num_clusters: int
) -> Standings:
    """Check the function, then time it and its rivals on ``num_clusters`` drawn clusters.

    Raises:
        LearnerError: there is no phase in the folder that ``impl`` names.
        ChallengeError: a result is wrong, a rank failed or hung, or a collective was called.
    """
    try:
        handed_in = submission.find(impl, folder.root)
    except ValueError as error:
        raise LearnerError(str(error)) from None
    yours_s = partial(checked_s, handed_in, challenge)
    for num_ranks, num_elements in SMALL_WORLDS:
        yours_s(num_elements, Cluster(1, num_ranks))
    clusters = draw(random.Random(seed), num_clusters)
    seconds = {name: tuple(rival_s(name, cluster) for cluster in clusters) for name in RIVALS}
    seconds["yours"] = tuple(yours_s(NUM_BYTES // 4, cluster) for cluster in clusters)
    return Standings(clusters, seconds)


def draw(numbers: random.Random, count: int) -> tuple[Cluster, ...]:
    """Draw clusters of 2 to 16 ranks; speeds and latencies are spread evenly in the logarithm."""
    return tuple(_drawn(numbers) for _ in range(count))


def _drawn(numbers: random.Random) -> Cluster:
    nodes = numbers.choice(NODES)
    gpus = numbers.choice([count for count in GPUS if nodes * count <= MAX_RANKS])
    inside = _between(numbers, NVLINK_BYTES_PER_S)
    latency_s = _between(numbers, LATENCY_S)
    return Cluster(
        nodes,
        gpus,
        nics_per_node=1,
        nvlink_bytes_per_s=inside,
        nic_bytes_per_s=inside * _between(numbers, NIC_SHARE),
        latency_s=latency_s,
        net_latency_s=2 * latency_s,
    )


def _between(numbers: random.Random, limits: tuple[float, float]) -> float:
    low, high = limits
    return float(low * (high / low) ** numbers.random())


def rival_s(algorithm: str, cluster: Cluster) -> float:
    """Seconds of a built-in all-reduce."""
    options = Options(algorithm=algorithm)
    return launch.simulate(built_in, cluster.num_gpus, cluster=cluster, options=options).seconds


def built_in() -> None:
    """Be one rank of a rival: nothing is computed, only sent."""
    dist.all_reduce(torch.empty(NUM_BYTES // 4, device="meta"))


def checked_s(
    handed_in: Submission, challenge: Challenge, num_elements: int, cluster: Cluster
) -> float:
    """Seconds of the learner's function on a cluster, if it sums there, and by messages alone.

    Raises:
        ChallengeError: it does not.
    """
    simulated = _simulated(handed_in, challenge, num_elements, cluster)
    if any(simulated.trace.collectives):
        raise ChallengeError(
            "it calls a built-in collective. Use messages: dist.send, dist.recv, dist.isend, "
            "dist.irecv, dist.batch_isend_irecv, and your own functions made of them."
        )
    for rank, wrong in enumerate(simulated.results):
        if wrong is not None:
            element, value, right = wrong
            raise ChallengeError(
                f"of {cluster.num_gpus} ranks with {counted(num_elements, 'number')} each, element "
                f"{element} of rank {rank} should be {right:g}, but is {value:g}. It must be the "
                "sum over all ranks, for any number of them and of elements."
            )
    return simulated.seconds


def first_difference(
    lesson: Any, function: str, num_elements: int
) -> tuple[int, float, float] | None:
    """Be one rank: return the first wrong element, what it is and should be; None if all are right.

    Rank r holds 2^r times 1, 2, … 8, 1, …: all sums are exact in float32, in any order.
    """
    ones = (torch.arange(num_elements) % 8 + 1).float()
    x = ones * 2.0 ** dist.get_rank()
    getattr(lesson, function)(x)
    right = ones * (2.0 ** dist.get_world_size() - 1)
    wrong = (x != right).nonzero()
    if not len(wrong):
        return None
    element = int(wrong[0])
    return element, float(x[element]), float(right[element])


def _simulated(
    handed_in: Submission, challenge: Challenge, num_elements: int, cluster: Cluster
) -> Simulated[tuple[int, float, float] | None]:
    """Run the learner's function on every rank; what ends it is a ChallengeError."""
    try:
        return launch.simulate(
            *(on_rank, cluster.num_gpus, handed_in, challenge, first_difference),
            (challenge.function, num_elements),
            cluster=cluster,
            options=Options(given=(str(Path(distlab.__file__).parent),), is_strict=True),
            limits=launch.Limits(TIMEOUT_S),
            plain_results=True,
        )
    except LaunchError as error:
        verdict = verdict_on(error)
        if verdict.missing:
            missing = verdict.missing[0]
            raise ChallengeError(
                f"{challenge.function} calls the function of task {missing}, which is not written "
                f"yet: write it, or replace the call in {challenge.template}"
            ) from None
        where = f"{counted(cluster.num_gpus, 'rank')}, {counted(num_elements, 'number')}"
        text = f"{challenge.function} on {where}: {verdict.message}\n{verdict.details}"
        raise ChallengeError(text.rstrip()) from None
