"""Judges task 3.9: the chosen algorithm is the fastest by the formulas."""

from math import ceil, log2

from distlab.grade import Grade, check, task
from judging.checks import check_silent
from phase3.algorithms import Case, choose_all
from phase3_multi_node.given import LinkCost, Topology

ALGORITHMS = RING, TREE, HIERARCHICAL = "ring", "tree", "hierarchical"
NEAR = 1.05  # a choice may take this many times as long as the fastest algorithm
SLOW = 1e6  # factor by which the seconds per byte are multiplied
NUM_CASES = 25  # number of cases for each algorithm to win, and for each odd shape
EXAMPLE: Case = (
    10**6,
    Topology(tuple(f"h{i // 2}" for i in range(8)), LinkCost(5e-6, 1e-11), LinkCost(20e-6, 1e-10)),
)


def _predicted(case: Case) -> dict[str, float]:
    """Return each algorithm's seconds, by the formulas that the docstring asks for."""
    n, topology = case
    counts = [len(ranks) for ranks in topology.nodes]
    num_ranks, k, g = sum(counts), len(counts), max(counts)
    inside, between = (x or LinkCost(0.0, 0.0) for x in (topology.inside, topology.between))
    share = n / num_ranks
    seconds = {
        RING: 2 * (num_ranks - 1) * max(inside.seconds(share), between.seconds(share)),
        TREE: 2 * ceil(log2(g)) * inside.seconds(n) + 2 * ceil(log2(k)) * between.seconds(n),
    }
    if len({*counts}) == 1:
        across_s = 2 * (k - 1) * between.seconds(n / k)
        seconds[HIERARCHICAL] = 2 * (g - 1) * inside.seconds(n / g) + across_s
    return seconds


def _drawn(grade: Grade, counts: list[int], *, is_tiny: bool = False) -> Case:
    """Draw a tensor's size and the links of a cluster, whose ranks are numbered at random.

    Args:
        counts: The number of ranks on each host.
        is_tiny: True for a tensor of a few bytes, and links so slow that each byte matters.
    """
    draw = grade.random.uniform
    hosts = [f"h{host}" for host, count in enumerate(counts) for _ in range(count)]
    grade.random.shuffle(hosts)
    slow = SLOW if is_tiny else 1.0
    inside = LinkCost(10 ** draw(-6, -4), slow * 10 ** draw(-11.5, -9.5))
    between = LinkCost(10 ** draw(-5, -3.5), slow * 10 ** draw(-11, -9))
    num_bytes = grade.random.randint(1, 2 * len(hosts)) if is_tiny else round(10 ** draw(1, 8))
    links = inside if max(counts) > 1 else None, between if len(counts) > 1 else None
    return num_bytes, Topology(tuple(hosts), *links)


@task("3.9")
def test_the_fastest_by_the_formulas_is_chosen(grade: Grade) -> None:
    """Even a few bytes are divided without rounding, since each byte counts."""
    cases = [EXAMPLE, *_clear_cases(grade), *_clear_cases(grade, is_tiny=True)] + [
        _drawn(grade, counts)
        for counts in ([4], [2], [7], [1] * 6, [1, 1], [3, 2], [1, 4, 4], [2, 2, 1, 1])
        for _ in range(NUM_CASES)
    ]
    run = grade.run(choose_all, 2, cases)
    check_silent(run, "choose_algorithm")
    for rank, chosen in enumerate(run.results):
        for case, name in zip(cases, chosen, strict=True):
            _check_choice(f"rank {rank} of 2, {_text(case)}", name, _predicted(case))


def _clear_cases(grade: Grade, *, is_tiny: bool = False) -> list[Case]:
    """Draw ``NUM_CASES`` cases for each algorithm, in which it wins by a factor above ``NEAR``."""
    cases: dict[str, list[Case]] = {name: [] for name in ALGORITHMS}
    while any(len(of_name) < NUM_CASES for of_name in cases.values()):
        nodes, gpus = grade.random.randrange(2, 9), grade.random.randrange(2, 9)
        case = _drawn(grade, [gpus] * nodes, is_tiny=is_tiny)
        (best, best_s), (_, next_s) = sorted(_predicted(case).items(), key=lambda e: e[1])[:2]
        if next_s > NEAR * best_s and len(cases[best]) < NUM_CASES:
            cases[best].append(case)
    return [case for of_name in cases.values() for case in of_name]


def _text(case: Case) -> str:
    num_bytes, topology = case
    counts, hosts = [len(ranks) for ranks in topology.nodes], [*topology.hosts]
    links = topology.inside, topology.between
    costs = ", ".join(
        f"{1e6 * link.alpha_s:.3g} µs and {1e-9 / link.beta_s_per_byte:.3g} GB/s {where}"
        for where, link in zip(("inside", "between"), links, strict=True)
        if link
    )
    is_shuffled = hosts != sorted(hosts, key=[*dict.fromkeys(hosts)].index)
    order = " that are not numbered host by host" if is_shuffled else ""
    return f"{num_bytes:,} bytes, hosts of {counts} ranks{order}, {costs}"


def _check_choice(where: str, name: str, seconds: dict[str, float]) -> None:
    check(
        name in ALGORITHMS,
        f'{where}: choose_algorithm should return "ring", "tree" or "hierarchical"; it returned '
        f"{name!r:.40}.",
    )
    times = ", ".join(f"{key} {1e6 * value:,.1f} µs" for key, value in seconds.items())
    check(
        name in seconds,
        f"{where}: {name} needs equally many ranks on all hosts; what can be run takes: {times}.",
    )
    best = min(seconds, key=lambda key: seconds[key])
    check(
        seconds[name] <= NEAR * seconds[best],
        f"{where}: {best} is the fastest, but you chose {name}; by algorithm, it takes: {times}. "
        f"Compare your own sums with these; n/N is not rounded. {_CAUSES[best]} {_CAUSES[name]}",
    )


_CAUSES = {
    RING: "A ring around all ranks goes on with its slowest link: each of its 2(N-1) steps is as "
    "long as the slowest message in it.",
    TREE: "A tree sends the whole tensor in every round, inside the hosts and between them.",
    HIERARCHICAL: "On two levels, rings inside the hosts take a g-th of the tensor at a time, and "
    "those across take a k-th of what is left; but all g ranks of a host send over one NIC.",
}
