"""Transfer plans: phases that run one after another, and the time that they take."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from distlab.sim.hardware.cluster import Cluster

Transfer = tuple[int, int, float]  # (src GPU, dst GPU, bytes)


@dataclass(frozen=True)
class Phase:
    """Transfers that run at the same time; the next phase begins when all have arrived.

    Phase(((0, 1, 250.0), (1, 0, 250.0)), repeat=6) is a swap of 250 bytes, done six times: each
    transfer takes 6 (latency + 250 bytes / bandwidth).

    Attributes:
        transfers: Transfers of one round, at least one.
        repeat: Number of rounds in a row.
        latency_s: Total latency of each transfer, if its pieces pass through several GPUs; None to
            use the latency of its route in every round.
        bytes_on_links: Bytes of each transfer with its protocol flags; empty if there are no flags.
    """

    transfers: tuple[Transfer, ...]
    repeat: int = 1
    latency_s: float | None = None
    bytes_on_links: tuple[float, ...] = ()


Phases = list[Phase]


def mirrored(phases: Phases) -> Phases:
    """Return the phases in reverse order, with senders and receivers swapped.

    Bytes and times stay the same. A copy of one buffer to many becomes a sum of many into one:
        broadcast    0→2   then  0→1  2→3
        reduce       1→0  3→2   then  2→0
    """
    return [
        Phase(tuple((dst, src, size) for src, dst, size in phase.transfers), phase.repeat)
        for phase in reversed(phases)
    ]


def together(plans: Iterable[Phases]) -> Phases:
    """Run plans of disjoint groups side by side; all must have the same number of phases."""
    return [
        Phase(tuple(chain.from_iterable(phase.transfers for phase in row)), row[0].repeat)
        for row in zip(*plans, strict=True)
    ]


def overlapped(plans: Sequence[Phases], cluster: Cluster) -> Phases:
    """Run plans at the same time, and so all phases of each, on pieces of its buffer.

    Pieces are assumed to be so small that the first one needs only the latencies of all phases. The
    rest takes as long as the slowest phase or, if that takes longer, the busiest link that phases
    share.
    """
    num_bytes: defaultdict[tuple[int, int], float] = defaultdict(float)
    on_links: defaultdict[tuple[int, int], float] = defaultdict(float)
    for phase in chain.from_iterable(plans):
        carried = phase.bytes_on_links or [size for _, _, size in phase.transfers]
        for (src, dst, size), flagged in zip(phase.transfers, carried, strict=True):
            num_bytes[src, dst] += phase.repeat * size
            on_links[src, dst] += phase.repeat * flagged
    transfers = tuple((*pair, size) for pair, size in num_bytes.items())
    latency_s = max((_latency_s(phases, cluster) for phases in plans), default=0.0)
    return [Phase(transfers, 1, latency_s, tuple(on_links.values()))] if transfers else []


def _latency_s(phases: Phases, cluster: Cluster) -> float:
    """Return the seconds that phases take besides their bytes."""
    total_s = 0.0
    for phase in phases:
        routes = (cluster.route(src, dst) for src, dst, _ in phase.transfers)
        of_round_s = max(route.latency_s for route in routes)
        total_s += phase.repeat * (of_round_s if phase.latency_s is None else phase.latency_s)
    return total_s


def round_s(phase: Phase, cluster: Cluster, *, shared: bool) -> float:
    """Return the seconds that one round of a phase takes if nothing else is on the links.

    A round lasts as long as its slowest transfer: latency + bytes / lowest bandwidth.

    Args:
        shared: True to split each link's bandwidth evenly among the transfers that cross it, which
            gives an upper bound on the time; False to ignore sharing, which gives a lower bound.
            The two agree if no link is shared.
    """
    routes = [cluster.route(src, dst) for src, dst, _ in phase.transfers]
    crossing = Counter(chain.from_iterable(route.links for route in routes))
    bytes_per_s = {
        link: cluster.links[link].bytes_per_s / (transfers if shared else 1)
        for link, transfers in crossing.items()
    }
    return max(
        route.latency_s + size / min(map(bytes_per_s.__getitem__, route.links))
        for route, (_, _, size) in zip(routes, phase.transfers, strict=True)
    )
