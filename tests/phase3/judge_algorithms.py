"""Judges task 3.10: whether the algorithm chosen is the fastest, as predicted and as run."""

from math import ceil, log2

import pytest

from distlab.grade import Grade, check, task
from distlab.sim import Cluster
from distlab.util.text import counted
from judging.checks import check_silent
from phase3 import orders as b

NEAR = 1.05  # times as long as the fastest, by the formulas
NEAR_AS_RUN = 1.07  # the same where chunks are rounded to whole elements
SLOW = 1e6  # times the seconds per byte
NUM_CASES = 25  # in which each of the three is the fastest, and as many of each odd shape


def _predicted(case: b.Case) -> dict[str, float]:
    """Seconds of each algorithm, by the formulas of the docstring."""
    num_bytes, hosts, inside, between = case
    counts = [hosts.count(host) for host in dict.fromkeys(hosts)]
    num_ranks, k, g = len(hosts), len(counts), max(counts)

    def message_s(link: b.Link, size: float) -> float:
        return link[0] + size * link[1] if link else 0.0

    share = num_bytes / num_ranks
    seconds = {
        b.RING: 2 * (num_ranks - 1) * max(message_s(inside, share), message_s(between, share)),
        b.TREE: 2 * ceil(log2(g)) * message_s(inside, num_bytes)
        + 2 * ceil(log2(k)) * message_s(between, num_bytes),
    }
    if len({*counts}) == 1:
        seconds[b.HIERARCHICAL] = 2 * (g - 1) * message_s(inside, num_bytes / g) + 2 * (
            k - 1
        ) * message_s(between, num_bytes / k)
    return seconds


def _drawn(grade: Grade, counts: list[int], *, is_tiny: bool = False) -> b.Case:
    """Draw sizes and links of hosts with so many ranks each, numbered in any way.

    Args:
        is_tiny: few bytes, of which each counts, as on a radio link.
    """
    draw = grade.random.uniform
    hosts = [f"h{host}" for host, count in enumerate(counts) for _ in range(count)]
    grade.random.shuffle(hosts)
    slow = SLOW if is_tiny else 1.0
    inside = 10 ** draw(-6, -4), slow * 10 ** draw(-11.5, -9.5)
    between = 10 ** draw(-5, -3.5), slow * 10 ** draw(-11, -9)
    num_bytes = grade.random.randint(1, 2 * len(hosts)) if is_tiny else round(10 ** draw(1, 8))
    return (
        num_bytes,
        tuple(hosts),
        inside if max(counts) > 1 else None,
        between if len(counts) > 1 else None,
    )


@task("3.10")
def test_the_fastest_by_the_formulas_is_chosen(grade: Grade) -> None:
    cases = _clear_cases(grade) + [
        _drawn(grade, counts)
        for counts in ([4], [2], [7], [1] * 6, [1, 1], [3, 2], [1, 4, 4], [2, 2, 1, 1])
        for _ in range(NUM_CASES)
    ]
    _check_cases(grade, cases)


@task("3.10")
def test_a_few_bytes_are_shared_too(grade: Grade) -> None:
    _check_cases(grade, _clear_cases(grade, is_tiny=True))


def _check_cases(grade: Grade, cases: list[b.Case]) -> None:
    run = grade.run(b.choose_all, 2, cases)
    check_silent(run, "choose_algorithm")
    for rank, chosen in enumerate(run.results):
        for case, name in zip(cases, chosen, strict=True):
            _check_choice(f"rank {rank} of 2, {_told(case)}", name, _predicted(case))


def _clear_cases(grade: Grade, *, is_tiny: bool = False) -> list[b.Case]:
    """Draw cases until each algorithm has been the fastest equally often, by more than is near."""
    cases: dict[str, list[b.Case]] = {name: [] for name in b.ALGORITHMS}
    while any(len(of_name) < NUM_CASES for of_name in cases.values()):
        nodes, gpus = grade.random.randrange(2, 9), grade.random.randrange(2, 9)
        case = _drawn(grade, [gpus] * nodes, is_tiny=is_tiny)
        (best, best_s), (_, next_s) = sorted(_predicted(case).items(), key=lambda e: e[1])[:2]
        if next_s > NEAR * best_s and len(cases[best]) < NUM_CASES:
            cases[best].append(case)
    return [case for of_name in cases.values() for case in of_name]


def _told(case: b.Case) -> str:
    num_bytes, hosts, inside, between = case
    counts = [hosts.count(host) for host in dict.fromkeys(hosts)]
    links = [
        f"{1e6 * link[0]:.3g} µs and {1e-9 / link[1]:.3g} GB/s {where}"
        for where, link in (("inside", inside), ("between", between))
        if link
    ]
    is_in_turn = list(hosts) != sorted(hosts, key=[*dict.fromkeys(hosts)].index)
    order = " that are not numbered host by host" if is_in_turn else ""
    return f"{num_bytes:,} bytes, hosts of {counts} ranks{order}, {', '.join(links)}"


def _check_choice(
    where: str, name: str, seconds: dict[str, float], verb: str = "takes", near: float = NEAR
) -> None:
    check(
        name in b.ALGORITHMS,
        f'{where}: choose_algorithm should return "ring", "tree" or "hierarchical"; it returned '
        f"{name!r:.40}.",
    )
    told = ", ".join(f"{key} {1e6 * value:,.1f} µs" for key, value in seconds.items())
    check(
        name in seconds,
        f"{where}: {name} needs equally many ranks on all hosts; what can be run {verb}: {told}.",
    )
    best = min(seconds, key=lambda key: seconds[key])
    check(
        seconds[name] <= near * seconds[best],
        f"{where}: {best} is the fastest, but you chose {name}; by algorithm, it {verb}: {told}. "
        f"Compare your own sums with these; n/N is not rounded. {_CAUSES[best]} {_CAUSES[name]}",
    )


_CAUSES = {
    b.RING: "A ring around all ranks goes on with its slowest link: each of its 2(N-1) steps is as "
    "long as the slowest message in it.",
    b.TREE: "A tree sends the whole tensor in every round, inside the hosts and between them.",
    b.HIERARCHICAL: "On two levels, 2(g-1) messages of n/g bytes travel inside, and then 2(k-1) "
    "steps follow in which the NIC of a host sends n/k bytes.",
}


@task("3.10")
@pytest.mark.parametrize(("nodes", "gpus", "n"), [(2, 4, 8), (4, 2, 8), (1, 4, 4), (2, 3, 5)])
def test_what_is_chosen_is_the_fastest_when_it_runs(
    grade: Grade, nodes: int, gpus: int, n: int
) -> None:
    draw = grade.random.uniform
    cluster = Cluster(
        nodes,
        gpus,
        nics_per_node=1,
        latency_s=10 ** draw(-6, -4.5),
        nvlink_bytes_per_s=10 ** draw(9.5, 11.5),
        net_latency_s=10 ** draw(-5, -4),
        nic_bytes_per_s=10 ** draw(9, 10.5),
    )
    hosts = [f"node{cluster.node_of(rank)}" for rank in range(n)]
    inside = cluster.latency_s, 1 / cluster.nvlink_bytes_per_s
    between = (cluster.net_latency_s, 1 / cluster.nic_bytes_per_s) if nodes > 1 else None
    sizes = [4 * round(10 ** draw(low, low + 1)) for low in (1, 2, 3, 4, 5)]
    run = grade.run(b.time_all, n, hosts, inside, between, sizes, cluster=cluster)
    for rank, found in enumerate(run.results):
        for place, (size, (name, _)) in enumerate(zip(sizes, found, strict=True)):
            slowest: dict[str, float] = {}
            for by_rank in run.results:
                for key, taken_s in by_rank[place][1].items():
                    slowest[key] = max(taken_s, slowest.get(key, 0.0))
            where = f"rank {rank} of {n}, {_told((size, tuple(hosts), inside, between))}"
            _check_choice(where, name, slowest, "took in the simulator", NEAR_AS_RUN)


@task("3.10")
def test_the_example_of_the_todo(grade: Grade) -> None:
    hosts = tuple(f"h{rank // 2}" for rank in range(8))
    case: b.Case = (10**6, hosts, (5e-6, 1e-11), (20e-6, 1e-10))
    (name,) = grade.call(b.choose_all, [case])
    _check_choice(
        f"the example, {counted(8, 'rank')}, {_told(case)}", name, _predicted(case), "takes"
    )
