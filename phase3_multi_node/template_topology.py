"""Two levels of links: which ranks share a host, what messages cost, and how to use that.

Tasks 3.6 to 3.9. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 3.6``.
"""

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
    # TODO 3.6: return what all ranks then know of hosts and links. Create the messages on
    #   group_device(group), and call wait_for before you stop the clock.
    #   Example: hosts a, b, a, b: ranks 0 and 2 can play inside, ranks 0 and 1 between the hosts.
    #   With 5 repeats, each pair sends 12 messages of each size.
    #   About 30 lines, in three or four functions.
    raise NotImplementedError(
        "Task 3.6: discover_topology, see guidelines.md#36-discover-the-topology"
    )


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
    # TODO 3.7: return the two groups of this rank.
    #   Example: hosts b, a, a, b: inside 0 3 | 1 2, across 0 1 | 2 3. If the group has the world's
    #   ranks 1, 2, 4 and 5, these are 1 5 | 2 4 and 1 2 | 4 5. Hosts b, a, a are refused.
    #   About 13 lines with a helper.
    raise NotImplementedError(
        "Task 3.7: node_groups, see guidelines.md#37-all-reduce-on-two-levels"
    )


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
    # TODO 3.7: let every rank end with the sum of all x.
    #   Example: 1,000 float32 numbers on 2 nodes of 4 ranks: each rank sends 1,000 bytes to the
    #   other node.
    #   About 3 lines.
    raise NotImplementedError(
        "Task 3.7: hierarchical_all_reduce, see guidelines.md#37-all-reduce-on-two-levels"
    )


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
    # TODO 3.8: return an order with the fewest slow hops.
    #   Example: [[0, 9, 1, 8], [9, 0, 8, 1], [1, 8, 0, 9], [8, 1, 9, 0]] -> [0, 2, 1, 3].
    #   About 6 lines.
    raise NotImplementedError("Task 3.8: ring_order, see guidelines.md#38-order-the-ring")


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
    # TODO 3.9: return the name of the fastest.
    #   Example: 1 kB on 4 hosts of 8 ranks, with the links of the docstring: ring 1,240 µs, tree
    #   110 µs, hierarchical 190 µs -> "tree".
    #   About 14 lines.
    raise NotImplementedError(
        "Task 3.9: choose_algorithm, see guidelines.md#39-choose-the-algorithm"
    )
