"""Judges task 3.6: the ranks' hosts, and the costs of messages, also on noisy links and on GPUs."""

import socket
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grade import Grade, Run, WrongResult, check, check_cost, task
from distlab.sim import Cluster, Options
from distlab.sim.engine.trace import departure_s
from distlab.sim.messages.group import SimGroup
from judging.calls import typed
from judging.checks import ON_CPU
from judging.expect import expect, expect_cost
from judging.groups import STUCK_IN_GROUP
from judging.pretend_device import PretendDevice, device_of
from phase3_multi_node.given import LinkCost, Topology

FUNCTION = "discover_topology"
DOMAIN = "gpu."  # common beginning of all host names, up to the dot
LATE_S = 0.05
WORK_S = 0.001


def discover(lesson: Any, arguments: Mapping[str, Any], group: Any = None) -> dict[str, Any]:
    """Discover the topology; return it as plain data, with this rank's host name."""
    if group is not None:
        arguments = {**arguments, "group": group}
    topology = typed(FUNCTION, lesson.discover_topology(**arguments), Topology)
    return {
        "hosts": [str(host) for host in topology.hosts],
        "inside": _cost("inside", topology.inside),
        "between": _cost("between", topology.between),
        "host": socket.gethostname(),
    }


def _cost(name: str, cost: Any) -> list[float] | None:
    if cost is None:
        return None
    if not isinstance(cost, LinkCost):
        raise WrongResult(f"{name} should be a LinkCost or None; it is {cost!r:.60}")
    values = cost.alpha_s, cost.beta_s_per_byte
    if not all(isinstance(value, float) for value in values):
        raise WrongResult(f"α and β of {name} should be floats; they are {values!r:.60}")
    return [float(value) for value in values]


def discover_in_groups(
    lesson: Any, groups: Sequence[Sequence[int]], arguments: Mapping[str, Any]
) -> list[dict[str, Any] | None]:
    """Discover in each group in turn, with host names ``gpu.node0`` and so on.

    Returns:
        For each group, its topology, or None on ranks outside the group.
    """
    made = [dist.new_group([*ranks]) for ranks in groups]
    name = socket.gethostname
    with _patched({(socket, "gethostname"): lambda: f"{DOMAIN}{name()}"}):
        return [
            discover(lesson, arguments, group) if dist.get_rank() in ranks else None
            for ranks, group in zip(groups, made, strict=True)
        ]


@contextmanager
def _patched(patches: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Patch once for all ranks, which are threads of one process, until the last one is done."""
    with ExitStack() as stack:
        if dist.get_rank() == 0:
            for (owner, name), value in patches.items():
                stack.enter_context(patch.object(owner, name, value))
        dist.barrier()
        yield
        dist.barrier()


def discover_with_delays(
    lesson: Any, arguments: Mapping[str, Any], delays_s: Mapping[int, Sequence[float]]
) -> dict[str, Any]:
    """Discover while messages are delayed.

    Args:
        delays_s: For each size in bytes, the delays of successive messages of that size from one
            rank to another.
    """
    sent: Counter[tuple[int, int, int]] = Counter()
    send = SimGroup.send

    def send_late(group: SimGroup, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        num_bytes = tensors[0].nbytes
        number = sent[group.rank(), dst, num_bytes]
        sent[group.rank(), dst, num_bytes] += 1
        if delay_s := dict(enumerate(delays_s.get(num_bytes, ()))).get(number):
            time.sleep(delay_s)
        return send(group, tensors, dst, tag)

    with _patched({(SimGroup, "send"): send_late}):
        return discover(lesson, arguments)


def discover_on_gpus(lesson: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Discover on pretend GPUs that work for ``WORK_S`` after each message has arrived.

    Returns:
        The topology, and the devices of the messages that were sent.
    """
    sent: list[str] = []
    work_s: defaultdict[int, float] = defaultdict(float)  # rank -> its GPU's remaining work
    send, recv = SimGroup.send, SimGroup.recv

    def noting_send(group: SimGroup, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        sent.append(str(device_of(tensors[0])))
        return send(group, tensors, dst, tag)

    def working_recv(group: SimGroup, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        work_s[dist.get_rank()] += WORK_S
        return recv(group, tensors, src, tag)

    patches = {
        (SimGroup, "send"): noting_send,
        (SimGroup, "recv"): working_recv,
        (dist, "get_backend"): lambda group=None: "nccl",
        (torch.cuda, "current_device"): lambda: 0,
        (torch.cuda, "synchronize"): lambda device=None: time.sleep(work_s.pop(dist.get_rank(), 0)),
    }
    with _patched(patches), PretendDevice("cuda:0"):
        result = discover(lesson, arguments)
    return {**result, "sent": sent}


KINDS = {"inside": "inside a host", "between": "between hosts"}
STUCK = (
    "Do all ranks make the same collective calls, and do the two ranks of a pair alternate? The "
    "one that serves sends first and then receives, the other receives first."
)


def _cluster(grade: Grade, nodes: int, gpus: int, numbering: str = "block") -> Cluster:
    """Make a cluster whose link speeds are drawn at random."""
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
    """Draw two odd sizes that no other message has, in random order."""
    sizes = [grade.random.randrange(low, 2 * low) | 1 for low in (8000, 800_000)]
    grade.random.shuffle(sizes)
    return sizes[0], sizes[1]


# Hosts and costs


@task("3.6")
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
    # If sends are buffered, as small ones are on real links, send returns before the bytes arrive.
    options = Options(eager_bytes=-1 if numbering == "block" else max(sizes))
    run = grade.run(discover, n, arguments, cluster=cluster, options=options, if_stuck=STUCK)
    _check_hosts(run.results)
    _check_costs(run.results, cluster)
    _check_messages(run, sizes, repeats)


def _check_hosts(by_rank: Sequence[dict[str, Any]]) -> None:
    n, expected = len(by_rank), [result["host"] for result in by_rank]
    for rank, result in enumerate(by_rank):
        expect(
            f"rank {rank} of {n}: hosts, what socket.gethostname() says on each rank,",
            *(result["hosts"], expected),
            "Ask the host for its name, and collect the whole names of all ranks in the order of "
            "their ranks in the group: the ranks of a host need not be neighbours, nor equally "
            "many, and names may differ only after the first dot.",
        )
        for kind in KINDS:
            expect(
                f"rank {rank} of {n}: α and β of {kind}, as on rank 0,",
                *(result[kind], by_rank[0][kind]),
                "Only the ranks that measure know what they found, and clocks differ: one rank "
                "should tell all others.",
            )


def _text(cost: Sequence[float] | None) -> str:
    if cost is None:
        return "None"
    return f"α = {1e6 * cost[0]:.3g} µs and β = {1e12 * cost[1]:.4g} µs per MB"


def _check_costs(by_rank: Sequence[dict[str, Any]], cluster: Cluster) -> None:
    hosts, n = by_rank[0]["hosts"], len(by_rank)
    right = {
        "inside": [cluster.latency_s, 1 / cluster.nvlink_bytes_per_s],
        "between": [cluster.net_latency_s, 1 / cluster.nic_bytes_per_s],
    }
    exists = {"inside": len({*hosts}) < n, "between": len({*hosts}) > 1}
    for kind, expected in right.items():
        got = by_rank[0][kind]
        here = f"{n} ranks on the hosts {hosts}: {kind}, what a message costs {KINDS[kind]},"
        check(
            (got is not None) == exists[kind],
            f"{here} is {_text(got)}. It should be None if, and only if, there are no two such "
            "ranks.",
        )
        if got is not None:
            _check_cost(here, got, expected, _cause(got, expected))


def _check_cost(here: str, got: list[float], expected: list[float], cause: str) -> None:
    check(
        _are_close(got, expected),
        f"{here} should be {_text(expected)}; it is {_text(got)}. {cause}",
    )


def _cause(got: list[float], expected: list[float]) -> str:
    if _are_close(got, [2 * value for value in expected]):
        return "That is twice as much: there and back are two messages."
    if got[0] < expected[0] / 100:
        return (
            "No message is that fast. Does the clock stop only when the message is back, which may "
            "be long after send has returned, and did the rank that told the others play itself?"
        )
    return (
        "Is each time that of a ping-pong of the pair of this kind, halved, is the slope between "
        "the two sizes β, in seconds per byte, and α what is left of a time without its n·β?"
    )


def _are_close(some: list[float], others: list[float]) -> bool:
    return all(abs(a - b) <= 0.01 * b for a, b in zip(some, others, strict=True))


GROUPS = (0, 1, 4), (1, 2, 4), (0, 1, 2, 4), (0, 3, 4, 5), (2, 5), (1, 3)  # rank r is on host r % 3


@task("3.6")
def test_pairs_are_found_wherever_they_are(grade: Grade) -> None:
    cluster = _cluster(grade, 3, 2, "cyclic")
    arguments = {"sizes_bytes": _sizes(grade), "repeats": 1}
    run = grade.run(
        *(discover_in_groups, 6, GROUPS, arguments), cluster=cluster, if_stuck=STUCK_IN_GROUP
    )
    for place, ranks in enumerate(GROUPS):
        members = [run.results[rank][place] for rank in ranks]
        _check_hosts(members)
        _check_costs(members, cluster)


@task("3.6", real=True)
def test_ranks_of_one_machine_share_a_host(grade: Grade) -> None:
    run = grade.run(discover, 3, {"repeats": 2}, if_stuck=STUCK)
    _check_hosts(run.results)
    result = run.results[0]
    check(
        result["between"] is None and result["inside"] is not None and min(result["inside"]) >= 0,
        "3 ranks on one host: between should be None, and α and β inside 0 or more; between is "
        f"{_text(result['between'])}, inside is {_text(result['inside'])}.",
    )


# Pairs that measure


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
    is_one = len(pairs) == 1
    judge = check_cost if pairs else check
    judge(
        is_one,
        f"one pair of ranks {where} should play; messages of {sizes[0]:,} and {sizes[1]:,} bytes "
        f"travelled between the pairs {pairs}. To measure all pairs takes N² ping-pongs. A tensor "
        "of n elements has n bytes if its dtype is uint8.",
    )
    if not is_one:
        return
    edges = pairs[0], pairs[0][::-1]
    expect_cost(
        f"{where}: the number of messages, as ((from, to), bytes): number,",
        dict(sorted(counts.items())),
        {(edge, size): repeats + 1 for edge in edges for size in sorted(sizes)},
        f"One of each is not timed, then there is one for each of {repeats} repeats.",
    )


@task("3.6")
def test_collectives_only_share_what_was_found(grade: Grade) -> None:
    cluster = _cluster(grade, 2, 2)
    few, many = (
        grade.run(discover, 4, {"repeats": repeats}, cluster=cluster, if_stuck=STUCK).collectives
        for repeats in (1, 6)
    )
    expect_cost(
        *("4 ranks, 6 repeats: the number of collective calls by rank, as with 1,", many, few),
        "Collectives share what was found; a pair needs none to play, since its messages wait for "
        "each other. A barrier before each ping-pong makes all other ranks come along.",
    )


# Times that differ


@task("3.6")
@pytest.mark.parametrize("repeats", [1, 4, 5])
def test_the_median_counts_on_a_noisy_link(grade: Grade, repeats: int) -> None:
    cluster, sizes = _cluster(grade, 1, 2), tuple(sorted(_sizes(grade), reverse=repeats % 2 == 0))
    # Delay the larger message longer, so that β is above 0.
    ranges_s = {min(sizes): (1e-3, 2e-3), max(sizes): (2e-3, 9e-3)}
    delays_s = {
        size: [LATE_S, *(grade.random.uniform(*limits_s) for _ in range(repeats))]
        for size, limits_s in ranges_s.items()
    }
    arguments = {"sizes_bytes": sizes, "repeats": repeats}
    run = grade.run(
        *(discover_with_delays, 2, arguments, delays_s), cluster=cluster, if_stuck=STUCK
    )

    seconds = [
        cluster.latency_s + size / cluster.nvlink_bytes_per_s + median(delays_s[size][1:])
        for size in sizes
    ]
    beta_s_per_byte = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
    _check_cost(
        f"2 ranks of a host, sizes_bytes={sizes}, {repeats} repeats of times that differ: inside",
        run.results[0]["inside"] or [0.0, 0.0],
        [seconds[0] - sizes[0] * beta_s_per_byte, beta_s_per_byte],
        "The first ping-pong is not timed; here it is late. The median of the others counts for "
        "each size, not their mean, the fastest or the slowest; of an even number of repeats the "
        "mean of the two in the middle. The line goes through both medians, whichever size comes "
        "first.",
    )


@task("3.6")
def test_noise_makes_no_cost_negative(grade: Grade) -> None:
    sizes = (1000, 2000)
    for noisy, (place, below) in zip(sizes, ((1, "β"), (0, "α")), strict=True):
        arguments = {"sizes_bytes": sizes, "repeats": 2}
        run = grade.run(
            *(discover_with_delays, 2, arguments, {noisy: [LATE_S] * 3}), if_stuck=STUCK
        )
        cost = run.results[0]["inside"]
        check(
            cost is not None and min(cost) >= 0 and cost[place] == 0,
            f"when all messages of {noisy:,} bytes are late by {1e3 * LATE_S:.0f} ms, and those "
            f"of {sum(sizes) - noisy:,} bytes are not, the line through their times has {below} "
            f"below 0. No link has that: {below} should be 0, and the other not below 0; they are "
            f"{_text(cost)}. max(…, 0.0) cuts off what abs would turn into a cost.",
        )


@task("3.6")
def test_gpus_are_waited_for(grade: Grade) -> None:
    arguments = {"sizes_bytes": (1000, 2000), "repeats": 2}
    result = grade.run(discover_on_gpus, 2, arguments, options=ON_CPU, if_stuck=STUCK).results[0]
    what = "a backend that needs tensors on the GPU: the devices of the messages sent"
    expect(what, sorted({*result["sent"]}), ["cuda:0"], "group_device(group) is cuda:0.")
    # In a round trip, rank 0 waits only for its own GPU, on the way back.
    least_s = WORK_S / 2
    check(
        result["inside"][0] >= 0.99 * least_s,
        f"the GPU of a rank works for {1e3 * WORK_S:g} ms after recv has returned, until the "
        f"message is there, so α should be {1e3 * least_s:g} ms or more; it is "
        f"{1e3 * result['inside'][0]:.3g} ms. Call wait_for before you read the clock again.",
    )
