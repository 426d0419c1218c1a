"""The open task of a phase: a learner's all-reduce against the built-in ones, on drawn clusters.

check    on small worlds: the sum, equal on all ranks, by messages alone
time     16 MiB on a few clusters whose shape and speeds are drawn, in virtual seconds
stand    the geometric mean, over the clusters, of the time of recursive doubling over one's own
"""

import random
from collections.abc import Mapping, Sequence
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
    for num_ranks, num_elements in SMALL_WORLDS:
        _check(_on_ranks(handed_in, challenge, sums, num_ranks, num_elements), num_ranks)
    clusters = draw(random.Random(seed), num_clusters)
    yours = partial(_on_ranks, handed_in, challenge, reduces)
    seconds = {name: tuple(rival_s(name, cluster) for cluster in clusters) for name in RIVALS}
    seconds["yours"] = tuple(yours(c.num_gpus, NUM_BYTES // 4, cluster=c).seconds for c in clusters)
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


def reduces(lesson: Any, function: str, num_elements: int) -> None:
    """Be one rank of a timed run: nothing is computed, only sent."""
    getattr(lesson, function)(torch.empty(num_elements, device="meta"))


def sums(lesson: Any, function: str, num_elements: int) -> list[float]:
    """Be one rank of a checked run; rank r holds 2^r times 1, 2, 3, …."""
    x = torch.arange(1, num_elements + 1, dtype=torch.float64) * 2.0 ** dist.get_rank()
    getattr(lesson, function)(x)
    return [float(value) for value in x]


def _on_ranks(
    handed_in: Submission,
    challenge: Challenge,
    body: Any,
    num_ranks: int,
    num_elements: int,
    cluster: Cluster | None = None,
) -> Simulated[Any]:
    """Run a body with the learner's function; what ends it is a ChallengeError."""
    try:
        return launch.simulate(
            *(on_rank, num_ranks, handed_in, challenge, body),
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
                f"{challenge.function} calls what task {missing} has not written yet: write that, "
                f"or replace the call in {challenge.template}"
            ) from None
        where = f"{counted(num_ranks, 'rank')}, {counted(num_elements, 'number')}"
        text = f"{challenge.function} on {where}: {verdict.message}\n{verdict.details}"
        raise ChallengeError(text.rstrip()) from None


def _check(simulated: Simulated[Any], num_ranks: int) -> None:
    if any(simulated.trace.collectives):
        raise ChallengeError(
            "it calls a built-in collective. Use messages: dist.send, dist.recv, dist.isend, "
            "dist.irecv, dist.batch_isend_irecv, and your own functions made of them."
        )
    for rank, values in enumerate(simulated.results):
        wanted = [(2.0**num_ranks - 1) * (i + 1) for i in range(len(values))]
        wrong = first_difference(values, wanted)
        if wrong is not None:
            raise ChallengeError(
                f"{num_ranks} ranks hold 2^rank times 1, 2, 3, …: element {wrong} of rank {rank} "
                f"should be {wanted[wrong]:g} and is {values[wrong]:g}. It must be the sum over "
                "all ranks, for any number of them and of elements."
            )


def first_difference(values: Sequence[float], wanted: Sequence[float]) -> int | None:
    """Return the index of the first element that is not as wanted, None if all are."""
    pairs = enumerate(zip(values, wanted, strict=True))
    return next((index for index, (value, right) in pairs if value != right), None)
