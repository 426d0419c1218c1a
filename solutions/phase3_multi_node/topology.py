"""Two levels of links: which ranks share a host, what messages cost, and how to use that."""

import socket
import time
from collections.abc import Sequence
from itertools import combinations
from math import ceil, log2
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from phase3_multi_node.given import (
    AllGather,
    AllReduce,
    Group,
    LinkCost,
    ReduceScatter,
    Topology,
    all_gather,
    all_reduce,
    group_device,
    ranks_by_host,
    reduce_scatter,
    wait_for,
)

SIZES_BYTES = (8, 2**22)
REPEATS = 5


def discover_topology(
    group: Group = None, *, sizes_bytes: tuple[int, int] = SIZES_BYTES, repeats: int = REPEATS
) -> Topology:
    """Find out which ranks share a host, and what messages cost inside and between hosts.

    A ping-pong sends a message to a rank and back, so it takes twice as long as one message. For
    example, ping-pongs of 10 µs for 8 bytes and 90 µs for 1 MB give α = 5 µs and β = 40 µs per MB.

    Args:
        group: the ranks that take part; all by default. The ranks of a host need not be neighbours.
        sizes_bytes: two different message sizes, in either order; α + nβ is the line through the
            times of their messages.
        repeats: number of timed ping-pongs of each size. An untimed one comes first, because the
            first message often opens the connection. Only the median of the times is used (for an
            even number, the mean of the two in the middle), so that a single slow ping-pong changes
            nothing.

    Returns:
        The topology, the same on all ranks: each rank's host name (``socket.gethostname()``), in
        the order of the ranks in the group, and the cost of a message, α and β, between two ranks
        of a host and between two hosts. A cost is None if there are no such ranks. Where noise
        makes α or β negative, that number is replaced by 0, and the other stays as it is.

    Cost: first a pair of ranks inside a host exchanges messages, then a pair between hosts, while
        all other ranks wait. Each pair sends 2(repeats + 1) messages of each
        size, however many ranks there are. A few collectives share the results; their number does
        not depend on ``repeats``.
    """
    hosts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)

    costs: dict[bool, LinkCost] = {}  # key: whether the two ranks share a host
    for a, b in combinations(range(len(hosts)), 2):
        is_inside = hosts[a] == hosts[b]
        if is_inside not in costs:
            costs[is_inside] = _link_cost(a, b, sizes_bytes, repeats, group)
    return Topology(tuple(hosts), costs.get(True), costs.get(False))


def _link_cost(
    a: int, b: int, sizes_bytes: tuple[int, int], repeats: int, group: Group
) -> LinkCost:
    """Measure messages between ranks ``a`` and ``b``, and share the result with all ranks."""
    seconds = [_message_s(a, b, num_bytes, repeats, group) for num_bytes in sizes_bytes]
    beta_s_per_byte = (seconds[1] - seconds[0]) / (sizes_bytes[1] - sizes_bytes[0])
    alpha_s = seconds[0] - sizes_bytes[0] * beta_s_per_byte
    found = [LinkCost(max(alpha_s, 0.0), max(beta_s_per_byte, 0.0))]
    dist.broadcast_object_list(found, group=group, group_src=a)  # only a and b have measured
    return found[0]


def _message_s(a: int, b: int, num_bytes: int, repeats: int, group: Group) -> float:
    """Return how long one message takes; the result is meaningless except on ``a`` and ``b``."""
    ball = torch.zeros(num_bytes, dtype=torch.uint8, device=group_device(group))
    _, *timed = [_ping_pong_s(a, b, ball, group) for _ in range(repeats + 1)]
    return median(timed) / 2


def _ping_pong_s(a: int, b: int, ball: Tensor, group: Group) -> float:
    rank = dist.get_rank(group)
    start_s = time.perf_counter()
    if rank == a:
        dist.send(ball, group=group, group_dst=b)
        dist.recv(ball, group=group, group_src=b)
    elif rank == b:
        dist.recv(ball, group=group, group_src=a)
        dist.send(ball, group=group, group_dst=a)
    wait_for(ball.device)
    return time.perf_counter() - start_s


def node_groups(hosts: Sequence[str], group: Group = None) -> tuple[Group, Group]:
    """Make this rank's two groups: the ranks of its host, and its counterparts on all hosts.

        hosts     a  a  b  b
        rank      0  1  2  3     inside: 0 1 | 2 3     across: 0 2 | 1 3

    All ranks of ``group`` call this together, and only once, because groups are expensive to make.

    Args:
        hosts: host of each rank of ``group``, in the order of its ranks; the same on all of them.
            The ranks of a host need not be neighbours.
        group: the ranks that take part; all by default. With a group, the other ranks of the world
            know nothing of this call and make no groups.

    Returns:
        ``inside`` and ``across``, both of which contain this rank. The i-th ranks of all hosts are
        counterparts.

    Raises:
        ValueError: the hosts have different numbers of ranks; the message contains these numbers.
            Raised on all ranks.
    """
    nodes = ranks_by_host(hosts)
    if len({len(ranks) for ranks in nodes}) > 1:
        raise ValueError(f"hosts must have equally many ranks, got {[*map(len, nodes)]}")
    return _own_group(nodes, group), _own_group([*zip(*nodes, strict=True)], group)


def _own_group(parts: Sequence[Sequence[int]], group: Group) -> Group:
    """Make a group of each part, on all ranks in the same order; return the one of this rank."""
    in_world, own = dist.get_process_group_ranks(group), None
    for part in parts:
        members = [in_world[rank] for rank in part]
        made = dist.new_group(members, use_local_synchronization=group is not None)
        own = made if dist.get_rank() in members else own
    return own


def hierarchical_all_reduce(
    x: Tensor,
    inside: Group,
    across: Group,
    *,
    reduce_scatter: ReduceScatter = reduce_scatter,
    all_reduce: AllReduce = all_reduce,
    all_gather: AllGather = all_gather,
) -> None:
    """Sum ``x`` over all ranks of all nodes, in place, with little traffic between the nodes.

    For example, with 2 nodes of 2 ranks and 2 elements in ``x``:
        rank                          0       1    |   2        3
        x                            1 2     3 4   |  10 20    30 40
        summed inside, a chunk each  4 .     . 6   |  40 .     . 60
        summed across                44 .    . 66  |  44 .     . 66
        gathered inside              44 66   44 66 |  44 66    44 66

    Args:
        x: contiguous tensor of any size; same shape and dtype on all ranks. On return, it holds the
            sum, bit for bit the same on all ranks.
        inside: group of this rank's node; all nodes have the same number of ranks.
        across: group of the ranks that have the same index inside their nodes as this rank, one
            rank per node.
        reduce_scatter, all_reduce, all_gather: functions for the three steps, each called once,
            with the tensor as a positional argument; torch's own by default. Those of tasks 3.1 and
            3.2 work too.

    Cost: for n bytes on k nodes of g ranks, with α₁ and β₁ inside a node, and α₂ and β₂ between
        nodes, each rank sends 2(k-1)/k · n/g bytes to other nodes. With rings, the time is
        2(g-1)(α₁ + n/g·β₁) + 2(k-1)(α₂ + n/(gk)·β₂) seconds if each rank has its own NIC. No memory
        beyond what the three functions use.
    Source: Mikami et al. 2018 (arXiv 1811.05233), the 2D-torus all-reduce.
    """
    chunk = reduce_scatter(x, inside)
    all_reduce(chunk, across)
    all_gather(x, inside)


def ring_order(seconds: Sequence[Sequence[float]]) -> list[int]:
    """Return the ranks in the order of a ring that crosses slow links as rarely as possible.

    For example, if ranks 0 and 2 share a host, and ranks 1 and 3 share another, then the ring
    0 → 2 → 1 → 3 → 0 crosses between hosts twice; 0 → 1 → 2 → 3 → 0 would do so four times.

    Args:
        seconds: measured times of messages: row i, column j holds the time from rank i to rank j.
            The times from i to j and from j to i may differ, and any two times may happen to be
            equal. But any message inside a host is faster than any that leaves it, and any message
            below a switch is faster than any that goes beyond the switch. The diagonal is
            meaningless. Not changed.

    Returns:
        Every rank once, beginning with rank 0; the last rank is followed by rank 0 again. The ring
        enters and leaves each host only once, whatever the host's size; the same holds for each
        leaf switch, and so on up the tree of switches.

    Cost: no communication; about N² comparisons for N ranks.
    """
    order, others = [0], set(range(1, len(seconds)))
    while others:
        from_here = seconds[order[-1]]
        order.append(min(others, key=lambda rank: from_here[rank]))
        others.remove(order[-1])
    return order


def choose_algorithm(num_bytes: int, topology: Topology) -> str:
    """Return the name of the fastest all-reduce: "ring", "tree" or "hierarchical".

    A time is the sum of the steps' times, and a step takes as long as its slowest message:
        "ring"          around all ranks, host by host, as in task 3.2
        "tree"          to the first rank of each host, from these to the very first rank, and back,
                        in binomial trees whose messages always carry the whole tensor
        "hierarchical"  as in task 3.7, with rings

        1 MB, α of 5 and 20 µs, 100 and 10 GB/s inside and between hosts
        4 hosts of 2 ranks  ->  455, 510 and 290 µs
        4 hosts of 8 ranks  ->  1,434, 570 and 358 µs

    The ranks of a host share one NIC: in the ring and the tree, only one of them at a time sends to
    other hosts; in the hierarchical all-reduce, all of them do, and share its bandwidth. If hosts
    have different numbers of ranks, the tree waits for the fullest.

    Args:
        num_bytes: size of the tensor on each rank; at least 1, possibly less than the number of
            ranks. It is divided without rounding: 5 bytes on 10 ranks are 0.5 bytes each.
        topology: topology of at least two ranks, numbered in any way. ``inside`` is None if no host
            has two ranks, and ``between`` is None if there is only one host: there are no such
            messages then.

    Returns:
        The name of the fastest all-reduce, or of any whose time is within 5 % of the shortest.
        "hierarchical" is possible only if all hosts have the same number of ranks.

    Cost: no communication.
    """
    counts = [len(ranks) for ranks in topology.nodes]
    n, num_ranks, k, g = num_bytes, sum(counts), len(counts), max(counts)
    none = LinkCost(0.0, 0.0)  # cost of a kind of message that never occurs
    inside, between = topology.inside or none, topology.between or none

    share = n / num_ranks
    seconds = {
        "ring": 2 * (num_ranks - 1) * max(inside.seconds(share), between.seconds(share)),
        "tree": 2 * ceil(log2(g)) * inside.seconds(n) + 2 * ceil(log2(k)) * between.seconds(n),
    }
    if min(counts) == g:
        across_s = 2 * (k - 1) * between.seconds(n / k)
        seconds["hierarchical"] = 2 * (g - 1) * inside.seconds(n / g) + across_s
    return min(seconds, key=lambda name: seconds[name])
