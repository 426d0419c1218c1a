"""Broken programs: calls that do not match.

The simulator reports a mismatch as soon as the calls are posted.
"""

import torch
import torch.distributed as dist
from catalogue import OPERATION, SHAPE, data, me, mismatch


@mismatch(
    4,
    OPERATION,
    (2,),
    "all_reduce on rank",
    "but broadcast on rank 2",
    "Every rank of a group must make the same collective calls in the same order.",
)
def another_collective() -> None:
    """One rank broadcasts where the others reduce."""
    if me() == 2:
        dist.broadcast(data(), 2)
    else:
        dist.all_reduce(data())


@mismatch(2, OPERATION, (0, 1), "broadcast with root 0 on rank 0, but with root 1 on rank 1")
def every_rank_its_own_root() -> None:
    """Every rank broadcasts with itself as the root."""
    dist.broadcast(data(), me())


@mismatch(
    2,
    SHAPE,
    (0, 1),
    "rank 0 sends (4,) float32, and rank 1 receives (3,) float32",
    "A send and its recv need the same number of elements and the same dtype. Messages from one "
    "rank to another with the same tag meet in the order of the calls.",
)
def receives_less_than_is_sent() -> None:
    """A recv buffer is too small."""
    if me() == 0:
        dist.send(data(), 1)
    else:
        dist.recv(data(3), 0)


@mismatch(
    4,
    OPERATION,
    (),
    "new_group of ranks 0 and 1 on rank",
    "new_group of ranks 0-3 on rank",
    "Every rank has to call new_group for every group in the same order, even for groups that it "
    "is not in.",
)
def new_group_by_its_members_only() -> None:
    """Only the members of a group create it."""
    if me() < 2:
        dist.new_group([0, 1])
    dist.barrier(dist.new_group(range(4)))


@mismatch(
    2, SHAPE, (0, 1), "in all_to_all rank 0 sends 3 elements to rank 1, which expects 2", "split"
)
def splits_that_do_not_fit() -> None:
    """In an all_to_all, rank 0 sends three elements where rank 1 expects two."""
    sent = [1, 3] if me() == 0 else [2, 2]
    received = [1, 2] if me() == 0 else [2, 2]
    dist.all_to_all_single(torch.zeros(sum(received)), torch.zeros(4), received, sent)
