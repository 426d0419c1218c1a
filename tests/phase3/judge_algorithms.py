"""Judges task 3.10: the algorithm chosen is the fastest by the formulas."""

from math import ceil, log2

from distlab.grade import Grade, check, task
from judging.checks import check_silent
from phase3 import orders as b

NEAR = 1.05  # times the seconds of the fastest
SLOW = 1e6  # times the seconds per byte
NUM_CASES = 25  # cases for each fastest algorithm, and for each odd shape
EXAMPLE: b.Case = (
    *(10**6, tuple(f"h{rank // 2}" for rank in range(8))),
    *((5e-6, 1e-11), (20e-6, 1e-10)),
)


def _predicted(case: b.Case) -> dict[str, float]:
    """Return the seconds of each algorithm, by the formulas of the docstring."""
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
    """Draw sizes and links of hosts with ``counts`` ranks each, numbered in any way.

    Args:
        is_tiny: True for few bytes, each of which counts, as on a radio link.
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
    """Few bytes are shared like many: each counts."""
    cases = [EXAMPLE, *_clear_cases(grade), *_clear_cases(grade, is_tiny=True)] + [
        _drawn(grade, counts)
        for counts in ([4], [2], [7], [1] * 6, [1, 1], [3, 2], [1, 4, 4], [2, 2, 1, 1])
        for _ in range(NUM_CASES)
    ]
    run = grade.run(b.choose_all, 2, cases)
    check_silent(run, "choose_algorithm")
    for rank, chosen in enumerate(run.results):
        for case, name in zip(cases, chosen, strict=True):
            _check_choice(f"rank {rank} of 2, {_text(case)}", name, _predicted(case))


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


def _text(case: b.Case) -> str:
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


def _check_choice(where: str, name: str, seconds: dict[str, float]) -> None:
    check(
        name in b.ALGORITHMS,
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
    b.RING: "A ring around all ranks goes on with its slowest link: each of its 2(N-1) steps is as "
    "long as the slowest message in it.",
    b.TREE: "A tree sends the whole tensor in every round, inside the hosts and between them.",
    b.HIERARCHICAL: "On two levels, 2(g-1) messages of n/g bytes travel inside, and then 2(k-1) "
    "steps follow in which the NIC of a host sends n/k bytes.",
}
