"""The open task of Phase 3: an all-reduce for clusters and sizes not known in advance.

prepare  the learner's function explores the cluster, and returns an all-reduce
check    every sum is right on every rank, and only messages are used, with at least as many bytes
         as a sum needs
time     virtual seconds from the arrival of the last rank until all ranks are done, for several
         sizes on a few random clusters; for each size, one rank starts late
score    geometric mean, over clusters and sizes, of the speedup over the built-in algorithm that
         turned out to be the fastest for that cluster and size
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distlab import launch
from distlab.course import Challenge
from distlab.grade.submission import Submission
from distlab.races import standings
from distlab.races.standings import RIVALS, YOURS, ChallengeError, Standings, Wrong, between
from distlab.sim import Cluster, Event, Options
from distlab.util.text import bytes_text, counted

SIZES_BYTES = (2**10, 2**15, 2**20, 2**24)
BEST = "best of these"
NODES, GPUS, MAX_RANKS = (1, 2, 3, 4, 6), (1, 2, 3, 4, 8), 16
NVLINK_BYTES_PER_S = (10e9, 300e9)
NIC_SHARE = (0.05, 0.5)  # network bandwidth relative to bandwidth inside a node
LATENCY_S = (2e-6, 20e-6)
NETWORK_LATENCY = (2.0, 10.0)  # network latency relative to latency inside a node
SLOW_NIC = 2.0  # slowdown of the first node's NICs, in about half of the multi-node clusters
LATE_S = (1e-6, 1e-3)
SMALL_WORLDS = ((1, 1), (2, 1), (3, 2), (5, 4), (2, 3))  # (nodes, GPUs per node)
SMALL_BYTES = (4, 28, 4012)

Late = tuple[int, float]  # (rank, delay in seconds)
Timed = tuple[float, float, Wrong | None]  # (start, end, first wrong element)


def race(
    handed_in: Submission, challenge: Challenge, numbers: random.Random, num_clusters: int
) -> tuple[Standings, ...]:
    """Check the function, then time it and its rivals on ``num_clusters`` random clusters.

    Raises:
        ChallengeError: A result is wrong, a rank failed or hung, a collective was called, or too
            few bytes were sent.
    """
    for nodes, gpus in SMALL_WORLDS:
        cluster = Cluster(nodes, gpus, numbering="cyclic")
        checked_s(handed_in, challenge, cluster, SMALL_BYTES, [(0, 0.0)] * len(SMALL_BYTES))
    clusters = [drawn(numbers) for _ in range(num_clusters)]
    return tuple(_standings(handed_in, challenge, cluster, numbers) for cluster in clusters)


def drawn(numbers: random.Random) -> Cluster:
    """Draw a cluster of 2 to 16 ranks, with random links and numbering."""
    shapes = [(k, g) for k in NODES for g in GPUS if 2 <= k * g <= MAX_RANKS]
    nodes, gpus = numbers.choice(shapes)
    inside, latency_s = between(numbers, NVLINK_BYTES_PER_S), between(numbers, LATENCY_S)
    cluster = Cluster(
        nodes,
        gpus,
        nics_per_node=numbers.choice([1, gpus]),
        nvlink_bytes_per_s=inside,
        nic_bytes_per_s=inside * between(numbers, NIC_SHARE),
        latency_s=latency_s,
        net_latency_s=latency_s * between(numbers, NETWORK_LATENCY),
        numbering=numbers.choice(["block", "cyclic"]),
    )
    is_uneven = numbers.random() < 0.5 and nodes > 1
    return cluster.slowed("node0.nic*", SLOW_NIC) if is_uneven else cluster


def title(cluster: Cluster) -> str:
    """Return a one-line description of a cluster."""
    order = "node by node" if cluster.numbering == "block" else "a rank on each node in turn"
    text = f"{counted(cluster.nodes, 'node')} of {counted(cluster.gpus_per_node, 'GPU')}"
    if cluster.nodes > 1:
        nics = counted(cluster.nics_per_node, "NIC")
        text += f", {nics} each, numbered {order}" + ", node 0 slower" * bool(cluster.faults)
    return text


def _standings(
    handed_in: Submission, challenge: Challenge, cluster: Cluster, numbers: random.Random
) -> Standings:
    late = [(numbers.randrange(cluster.num_gpus), between(numbers, LATE_S)) for _ in SIZES_BYTES]
    seconds = {name: rival_s(name, cluster, late) for name in RIVALS}
    seconds[BEST] = tuple(map(min, zip(*seconds.values(), strict=True)))
    seconds[YOURS] = checked_s(handed_in, challenge, cluster, SIZES_BYTES, late)
    columns = tuple(map(bytes_text, SIZES_BYTES))
    return Standings(title(cluster), columns, seconds, BEST)


def rival_s(algorithm: str, cluster: Cluster, late: Sequence[Late]) -> tuple[float, ...]:
    """Return the virtual seconds that a built-in all-reduce takes, by size."""
    options = Options(algorithm=algorithm, has_events=False)
    run = launch.simulate(built_in, cluster.num_gpus, late, cluster=cluster, options=options)
    return _seconds(run.results)


def built_in(late: Sequence[Late]) -> list[Timed]:
    """Run a rival on one rank, with meta tensors, so that nothing is computed."""
    sums: list[Timed] = []
    for num_bytes, one_late in zip(SIZES_BYTES, late, strict=True):
        x = torch.empty(num_bytes // 4, device="meta")
        sums.append((*_timed(dist.all_reduce, x, one_late), None))
    return sums


def summed(
    lesson: Any, function: str, sizes_bytes: Sequence[int], late: Sequence[Late]
) -> list[Timed]:
    """Run one rank: prepare, then sum each size and check every element."""
    all_reduce = getattr(lesson, function)()
    sums = []
    for num_bytes, one_late in zip(sizes_bytes, late, strict=True):
        x = standings.numbers_of_rank(num_bytes // 4, dist.get_rank())
        begin, end = _timed(all_reduce, x, one_late)
        sums.append((begin, end, standings.first_wrong(x, dist.get_world_size())))
    return sums


def _timed(
    all_reduce: Callable[[torch.Tensor], object], x: torch.Tensor, late: Late
) -> tuple[float, float]:
    dist.barrier()
    late_rank, late_s = late
    time.sleep(late_s if dist.get_rank() == late_rank else 0.0)
    begin = time.perf_counter()
    all_reduce(x)
    return begin, time.perf_counter()


def _seconds(by_rank: Sequence[Sequence[Timed]]) -> tuple[float, ...]:
    """Return, for each size, the time from the last rank's start to the last rank's end."""
    sizes = zip(*by_rank, strict=True)
    return tuple(
        max(end for _, end, _ in ranks) - max(begin for begin, _, _ in ranks) for ranks in sizes
    )


def checked_s(
    handed_in: Submission,
    challenge: Challenge,
    cluster: Cluster,
    sizes_bytes: Sequence[int],
    late: Sequence[Late],
) -> tuple[float, ...]:
    """Check the learner's all-reduce; return the virtual seconds that it takes, by size.

    Raises:
        ChallengeError: The sums on this cluster are wrong, or were not computed with messages only.
    """
    sizes = f"{bytes_text(sizes_bytes[0])} to {bytes_text(sizes_bytes[-1])}"
    args = tuple(sizes_bytes), tuple(late)
    run = standings.simulated(handed_in, challenge, summed, args, cluster, sizes)
    for rank, sums in enumerate(run.results):
        for num_bytes, (_, _, wrong) in zip(sizes_bytes, sums, strict=True):
            standings.refuse_wrong(rank, wrong, cluster.num_gpus, num_bytes // 4)
    if cluster.num_gpus > 1:
        ready_s = [_ready_s(rank, sums, late[0]) for rank, sums in enumerate(run.results)]
        sent = [e for e in run.trace.events if e.start_s >= ready_s[e.rank]]
        _refuse_collectives(sent, len(sizes_bytes))
        _refuse_short_messages(sent, sum(sizes_bytes), cluster.num_gpus)
    return _seconds(run.results)


def _ready_s(rank: int, sums: Sequence[Timed], first_late: Late) -> float:
    """Return when a rank's preparation and first barrier had ended, rounded down."""
    late_rank, late_s = first_late
    return sums[0][0] - (late_s if rank == late_rank else 0.0) - 1e-12


def _refuse_collectives(events: Iterable[Event], num_sums: int) -> None:
    """Raise a ChallengeError for any collectives except our own barriers between the sums."""
    called = [event for event in events if event.kind == "collective"]
    by_rank = Counter(event.rank for event in called)
    if any(event.name != "barrier" for event in called) or max(by_rank.values()) >= num_sums:
        raise ChallengeError(
            "the all-reduce that it returns calls a built-in collective. Collectives are for the "
            "preparation. Sum with messages: dist.send, dist.recv, dist.isend, dist.irecv, "
            "dist.batch_isend_irecv, and your own functions made of them."
        )


def _refuse_short_messages(events: Sequence[Event], needed: int, num_ranks: int) -> None:
    """Raise a ChallengeError if a rank has sent or received fewer bytes than the sums need."""
    for kind, verb in (("send", "sent"), ("recv", "received")):
        num_bytes = [0] * num_ranks
        for event in events:
            if event.kind == kind:
                num_bytes[event.rank] += event.num_bytes
        least = min(num_bytes)
        if least < needed:
            raise ChallengeError(
                f"of {num_ranks} ranks, rank {num_bytes.index(least)} has {verb} {least:,} bytes "
                f"in messages, but to sum {needed:,} bytes it takes at least as many. Ranks may "
                "learn about each other's numbers by messages alone."
            )
