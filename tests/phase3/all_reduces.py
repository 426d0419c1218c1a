"""All-reduces of the grader's own, made of messages: what learners' functions are given or meet."""

import torch
import torch.distributed as dist
from torch import Tensor

from phase3_multi_node.given import Group, exchange


def ring_reduce_scatter(x: Tensor, group: Group = None) -> Tensor:
    """Sum ``x`` around a ring; rank r gets chunk r, a view of ``x``."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = x.view(-1).tensor_split(n)
    arrived = torch.empty_like(chunks[0])
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = arrived[: len(mine)]
        exchange(chunks[(rank - step - 1) % n], (rank + 1) % n, incoming, (rank - 1) % n, group)
        mine += incoming
    return chunks[rank]


def ring_all_gather(x: Tensor, group: Group = None) -> None:
    """Collect the chunks of all ranks in ``x``, around a ring."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = x.view(-1).tensor_split(n)
    for step in range(n - 1):
        outgoing, incoming = (chunks[(rank - step - i) % n] for i in (0, 1))
        exchange(outgoing, (rank + 1) % n, incoming, (rank - 1) % n, group)


def ring_all_reduce(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` in place, around a ring."""
    ring_reduce_scatter(x, group)
    ring_all_gather(x, group)


RINGS = {
    "reduce_scatter": ring_reduce_scatter,
    "all_reduce": ring_all_reduce,
    "all_gather": ring_all_gather,
}


def hierarchical_all_reduce(x: Tensor, inside: Group, across: Group) -> None:
    """Sum ``x`` in place on two levels, with rings."""
    ring_all_reduce(ring_reduce_scatter(x, inside), across)
    ring_all_gather(x, inside)


def tree_reduce(x: Tensor, group: Group) -> None:
    """Sum ``x`` on rank 0 of the group, in a binomial tree."""
    rank, n, arrived = dist.get_rank(group), dist.get_world_size(group), torch.empty_like(x)
    distance = 1
    while distance < n:
        if rank & distance:
            dist.send(x, group=group, group_dst=rank - distance)
            return
        if rank + distance < n:
            dist.recv(arrived, group=group, group_src=rank + distance)
            x += arrived
        distance *= 2


def tree_broadcast(x: Tensor, group: Group) -> None:
    """Give all ranks the ``x`` of rank 0 of the group, in a binomial tree."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    distance = 1 << (n - 1).bit_length()
    while distance := distance >> 1:
        if rank % (2 * distance) == 0 and rank + distance < n:
            dist.send(x, group=group, group_dst=rank + distance)
        elif rank % (2 * distance) == distance:
            dist.recv(x, group=group, group_src=rank - distance)


def tree_all_reduce(x: Tensor, inside: Group, leaders: Group) -> None:
    """Sum ``x`` in place: in trees to the first rank of the node and of all nodes, and back.

    Args:
        leaders: the first ranks of all nodes, also on ranks that are not among them.
    """
    tree_reduce(x, inside)
    if dist.get_rank(inside) == 0:
        tree_reduce(x, leaders)
        tree_broadcast(x, leaders)
    tree_broadcast(x, inside)
