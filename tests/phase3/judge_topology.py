"""Judges task 3.7: hosts of the ranks, and costs of messages."""

from collections import Counter
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.sim import Cluster, Options
from distlab.sim.engine.trace import departure_s
from judging.comparing import check_equal
from judging.groups import STUCK_IN_GROUP
from phase3 import discovery as d

KINDS = {"inside": "inside a host", "between": "between hosts"}
STUCK = (
    "Do all ranks make the same collective calls, and do the two ranks of a pair alternate? The "
    "one that serves sends first and then receives, the other receives first."
)


def _cluster(grade: Grade, nodes: int, gpus: int, numbering: str = "block") -> Cluster:
    """Draw the links of a cluster."""
    draw = grade.random.uniform
    return Cluster(
        nodes,
        gpus,
        numbering=numbering,
        latency_s=draw(2e-6, 9e-6),
        nvlink_bytes_per_s=draw(1e11, 4e11),
        net_latency_s=draw(2e-5, 9e-5),
        nic_bytes_per_s=draw(1e9, 4e10),
    )


def _sizes(grade: Grade) -> tuple[int, int]:
    """Draw odd sizes that no other message has, the larger one first as often as not."""
    sizes = [grade.random.randrange(low, 2 * low) | 1 for low in (8000, 800_000)]
    grade.random.shuffle(sizes)
    return sizes[0], sizes[1]


# Hosts and costs


@task("3.7")
@pytest.mark.parametrize(
    ("nodes", "gpus", "n", "numbering"),
    [
        (2, 4, 8, "cyclic"),
        (3, 2, 5, "cyclic"),
        (2, 3, 4, "block"),
        (1, 3, 3, "block"),
        (3, 1, 3, "block"),
        (1, 1, 1, "block"),
    ],
)
def test_hosts_and_links_are_those_of_the_cluster(
    grade: Grade, nodes: int, gpus: int, n: int, numbering: str
) -> None:
    cluster, sizes = _cluster(grade, nodes, gpus, numbering), _sizes(grade)
    repeats = grade.random.randrange(2, 6)
    arguments = {"sizes_bytes": sizes, "repeats": repeats}
    # Where sends are buffered, as small ones are on real links, send returns before bytes arrive.
    options = Options(eager_bytes=-1 if numbering == "block" else max(sizes))
    run = grade.run(d.discover, n, arguments, cluster=cluster, options=options, if_stuck=STUCK)
    _check_hosts(run.results)
    _check_costs(run.results, cluster)
    _check_messages(run, sizes, repeats)


def _check_hosts(by_rank: Sequence[dict[str, Any]]) -> None:
    n, expected = len(by_rank), [result["host"] for result in by_rank]
    for rank, result in enumerate(by_rank):
        check_equal(
            *(f"rank {rank} of {n}", "hosts, what socket.gethostname() says on each rank,"),
            *(expected, result["hosts"]),
            "Ask the host for its name, and collect the whole names of all ranks in the order of "
            "their ranks in the group: the ranks of a host need not be neighbours, nor equally "
            "many, and names may differ only after the first dot.",
        )
        for kind in KINDS:
            check_equal(
                *(f"rank {rank} of {n}", f"α and β of {kind}, as on rank 0,"),
                *(by_rank[0][kind], result[kind]),
                "Only the ranks that measure know what they found, and clocks differ: one rank "
                "should tell all others.",
            )


def _text(cost: Sequence[float] | None) -> str:
    if cost is None:
        return "None"
    return f"α = {1e6 * cost[0]:.3g} µs and β = {1e12 * cost[1]:.4g} µs per MB"


def _check_costs(by_rank: Sequence[dict[str, Any]], cluster: Cluster) -> None:
    hosts, n = by_rank[0]["hosts"], len(by_rank)
    inside, between = (
        [cluster.latency_s, 1 / cluster.nvlink_bytes_per_s],
        [cluster.net_latency_s, 1 / cluster.nic_bytes_per_s],
    )
    exists = {"inside": len({*hosts}) < n, "between": len({*hosts}) > 1}
    for kind, expected, other in (("inside", inside, between), ("between", between, inside)):
        got = by_rank[0][kind]
        here = f"{n} ranks on the hosts {hosts}: {kind}, what a message costs {KINDS[kind]},"
        check(
            (got is not None) == exists[kind],
            f"{here} is {_text(got)}. It should be None if, and only if, there are no two such "
            "ranks.",
        )
        if got is not None:
            _check_cost(here, got, expected, _cause(got, expected, other))


def _check_cost(here: str, got: list[float], expected: list[float], cause: str) -> None:
    check(
        _are_close(got, expected),
        f"{here} should be {_text(expected)}; it is {_text(got)}. {cause}",
    )


def _cause(got: list[float], expected: list[float], other: list[float]) -> str:
    if _are_close(got, other):
        return "That is what messages of the other kind cost."
    if _are_close(got, [2 * value for value in expected]):
        return "That is twice as much: there and back are two messages."
    if got[0] < expected[0] / 100:
        return (
            "No message is that fast. Does the clock stop only when the message is back, which may "
            "be long after send has returned, and did the rank that told the others play itself?"
        )
    if _are_close(got[1:], expected[1:]):
        return "β is right: α is what is left of the time of a message without its n·β."
    return (
        "Is each time that of a ping-pong of the pair of this kind, halved, and is the slope "
        "between the two sizes β, in seconds per byte?"
    )


def _are_close(some: list[float], others: list[float]) -> bool:
    return all(abs(a - b) <= 0.01 * b for a, b in zip(some, others, strict=True))


PATTERNS = "abb", "aba", "abcb", "aabc"  # hosts of a group's ranks


@task("3.7")
def test_pairs_are_found_wherever_they_are(grade: Grade) -> None:
    cluster = _cluster(grade, 3, 4, "cyclic")
    drawn = ["".join(grade.random.choices("abc", k=grade.random.randint(2, 4))) for _ in range(4)]
    groups = [_ranks_on(pattern) for pattern in (*PATTERNS, *drawn)]
    arguments = {"sizes_bytes": _sizes(grade), "repeats": 1}
    run = grade.run(
        *(d.discover_in_groups, 12, groups, arguments), cluster=cluster, if_stuck=STUCK_IN_GROUP
    )
    for place, ranks in enumerate(groups):
        members = [run.results[rank][place] for rank in ranks]
        _check_hosts(members)
        _check_costs(members, cluster)


def _ranks_on(pattern: str) -> list[int]:
    """Return ascending ranks that are on these hosts; the hosts have ranks in turn."""
    ranks: list[int] = []
    for host in pattern:
        ranks.append(
            next(r for r in range(ranks[-1] + 1 if ranks else 0, 12) if "abc"[r % 3] == host)
        )
    return ranks


@task("3.7", real=True)
def test_ranks_of_one_machine_share_a_host(grade: Grade) -> None:
    run = grade.run(d.discover, 3, {"repeats": 2}, if_stuck=STUCK)
    _check_hosts(run.results)
    result = run.results[0]
    check(
        result["between"] is None and result["inside"] is not None and min(result["inside"]) >= 0,
        "3 ranks on one host: between should be None, and α and β inside 0 or more; between is "
        f"{_text(result['between'])}, inside is {_text(result['inside'])}.",
    )


# Who plays


def _check_messages(run: Run, sizes: tuple[int, int], repeats: int) -> None:
    pairs = run.trace.pairs() if run.trace else ()
    sent = sorted(
        (pair for pair in pairs if pair[0].num_bytes in sizes),
        key=lambda pair: (departure_s(*pair), pair[1].end_s),
    )
    until_s = 0.0
    for send, recv in sent:
        check(
            departure_s(send, recv) >= until_s - 1e-12,
            f"the message of {send.num_bytes:,} bytes from rank {send.rank} to rank {recv.rank} "
            "left while another one was on its way. They may share a link, and then slow each "
            "other down: let one pair play after the other.",
        )
        until_s = recv.end_s
    hosts = run.results[0]["hosts"]
    for kind, where in KINDS.items():
        if run.results[0][kind] is not None:
            counts = Counter(
                ((send.rank, recv.rank), send.num_bytes)
                for send, recv in sent
                if (hosts[send.rank] == hosts[recv.rank]) == (kind == "inside")
            )
            _check_one_pair(counts, where, sizes, repeats)


def _check_one_pair(counts: Counter[Any], where: str, sizes: Sequence[int], repeats: int) -> None:
    pairs = sorted({tuple(sorted(edge)) for edge, _ in counts})
    check(
        len(pairs) == 1,
        f"one pair of ranks {where} should play; messages of {sizes[0]:,} and {sizes[1]:,} bytes "
        f"travelled between the pairs {pairs}. To measure all pairs takes N² ping-pongs. A tensor "
        "of n elements has n bytes if its dtype is uint8.",
    )
    edges = pairs[0], pairs[0][::-1]
    check_equal(
        *(where, "the number of messages, as ((from, to), bytes): number,"),
        {(edge, size): repeats + 1 for edge in edges for size in sorted(sizes)},
        dict(sorted(counts.items())),
        f"One of each is not timed, then there is one for each of {repeats} repeats.",
    )


@task("3.7")
def test_collectives_only_share_what_was_found(grade: Grade) -> None:
    cluster = _cluster(grade, 2, 2)
    few, many = (
        grade.run(d.discover, 4, {"repeats": repeats}, cluster=cluster, if_stuck=STUCK).collectives
        for repeats in (1, 6)
    )
    check_equal(
        *("4 ranks, 6 repeats", "the number of collective calls by rank, as with 1,", few, many),
        "Collectives share what was found; a pair needs none to play, since its messages wait for "
        "each other. A barrier before each ping-pong makes all other ranks come along.",
    )


# Times that differ


@task("3.7")
@pytest.mark.parametrize("repeats", [1, 4, 5])
def test_the_median_counts_on_a_noisy_link(grade: Grade, repeats: int) -> None:
    cluster, sizes = _cluster(grade, 1, 2), tuple(sorted(_sizes(grade), reverse=repeats % 2 == 0))
    # The longer message is later, so that β is above 0.
    ranges_s = {min(sizes): (1e-3, 2e-3), max(sizes): (2e-3, 9e-3)}
    delays_s = {
        size: [d.LATE_S, *(grade.random.uniform(*limits_s) for _ in range(repeats))]
        for size, limits_s in ranges_s.items()
    }
    arguments = {"sizes_bytes": sizes, "repeats": repeats}
    run = grade.run(
        *(d.discover_with_delays, 2, arguments, delays_s), cluster=cluster, if_stuck=STUCK
    )

    def line(statistic: Any) -> list[float]:
        """Return α and β of the line through two times."""
        seconds = [
            cluster.latency_s + size / cluster.nvlink_bytes_per_s + statistic(delays_s[size][1:])
            for size in sizes
        ]
        beta_s_per_byte = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
        return [seconds[0] - sizes[0] * beta_s_per_byte, beta_s_per_byte]

    got = run.results[0]["inside"] or [0.0, 0.0]
    others = {"fastest": min, "mean": mean, "slowest": max} if repeats > 1 else {}
    used = next(
        (name for name, statistic in others.items() if _are_close(got, line(statistic))), ""
    )
    _check_cost(
        f"2 ranks of a host, sizes_bytes={sizes}, {repeats} repeats of times that differ: inside",
        *(got, line(median)),
        (f"That is what the {used} of the ping-pongs gives. " if used else "")
        + "The first ping-pong is not timed; here it is late. The median of the others counts for "
        "each size, of an even number of repeats the mean of the two in the middle, and the line "
        "goes through both medians, whichever size comes first.",
    )


@task("3.7")
def test_noise_makes_no_cost_negative(grade: Grade) -> None:
    sizes = (1000, 2000)
    for noisy, (place, below) in zip(sizes, ((1, "β"), (0, "α")), strict=True):
        arguments = {"sizes_bytes": sizes, "repeats": 2}
        run = grade.run(
            *(d.discover_with_delays, 2, arguments, {noisy: [d.LATE_S] * 3}), if_stuck=STUCK
        )
        cost = run.results[0]["inside"]
        check(
            cost is not None and min(cost) >= 0 and cost[place] == 0,
            f"when all messages of {noisy:,} bytes are late by {1e3 * d.LATE_S:.0f} ms, and those "
            f"of {sum(sizes) - noisy:,} bytes are not, the line through their times has {below} "
            f"below 0. No link has that: {below} should be 0, and the other not below 0; they are "
            f"{_text(cost)}. max(…, 0.0) cuts off what abs would turn into a cost.",
        )


@task("3.7")
def test_gpus_are_waited_for(grade: Grade) -> None:
    arguments = {"sizes_bytes": (1000, 2000), "repeats": 2}
    result = grade.run(d.discover_on_gpus, 2, arguments, if_stuck=STUCK).results[0]
    check_equal(
        *("a backend that needs tensors on the GPU", "the devices of the messages sent"),
        *(["cuda:0"], sorted({*result["sent"]}), "group_device(group) is cuda:0."),
    )
    # Of the way there and back, rank 0 waits for the way back alone.
    least_s = d.WORK_S / 2
    check(
        result["inside"][0] >= 0.99 * least_s,
        f"the GPU of a rank works for {1e3 * d.WORK_S:g} ms after recv has returned, until the "
        f"message is there, so α should be {1e3 * least_s:g} ms or more; it is "
        f"{1e3 * result['inside'][0]:.3g} ms. Call wait_for before you read the clock again.",
    )
