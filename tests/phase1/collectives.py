"""Bodies for task 1.4, and one for 1.5."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from judging.tensors import KINDS, exact, given_group, plain

# 1.4


def exchange_all_kinds(
    lesson: Any, dsts: Sequence[int], are_alike: bool, group: Any = None
) -> dict[str, list[Any]]:
    """Send every kind of tensor to ``dsts[rank]``; return what both tensors hold.

    All ranks send the same kind, or in step i rank r kind i + r, so that what leaves and what
    arrives differ in kind.
    """
    rank, num_kinds = dist.get_rank(group), len(KINDS)
    src, mine = dsts.index(rank), [exact(kind, rank) for kind in KINDS]
    others = [torch.zeros_like(tensor) for tensor in mine]
    memory = [tensor.detach() for tensor in others]
    for i in range(num_kinds):
        out, into = (i if are_alike else (i + r) % num_kinds for r in (rank, src))
        lesson.exchange(mine[out], dsts[rank], others[into], src, **given_group(group))
    return {"incoming": plain(memory), "outgoing": plain(mine)}


def exchange_once(lesson: Any, dsts: Sequence[int], lengths: Sequence[int]) -> None:
    """Send as many numbers as the rank's length says, once."""
    rank = dist.get_rank()
    src = dsts.index(rank)
    outgoing, incoming = torch.zeros(lengths[rank]), torch.zeros(lengths[src])
    lesson.exchange(outgoing, dsts[rank], incoming, src)


def exchange_then_write(lesson: Any) -> list[float]:
    """Overwrite what was sent as soon as exchange returns, while one rank comes late.

    Returns:
        What the incoming tensor holds at once, and later.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = torch.full((4,), float(rank)), torch.full((4,), -1.0)
    if rank == size - 1:
        time.sleep(0.01)
    lesson.exchange(outgoing, (rank + 1) % size, incoming, (rank - 1) % size)
    at_once = float(incoming.mean())
    outgoing.fill_(-99.0)
    dist.barrier()
    return [at_once, float(incoming.mean())]


# 1.5


def broadcast_twice(lesson: Any, late: int, srcs: Sequence[int]) -> list[float]:
    """Broadcast from two ranks, one after the other, while one rank comes late."""
    rank = dist.get_rank()
    if rank == late:
        time.sleep(0.01)
    held = []
    for i, src in enumerate(srcs):
        x = torch.tensor(float(10 * i + rank))
        lesson.broadcast(x, src)
        held.append(float(x))
    return held
