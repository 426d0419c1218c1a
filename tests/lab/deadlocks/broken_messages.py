"""Broken programs: sends and receives that wait for each other in a cycle."""

import torch.distributed as dist
from catalogue import CYCLE, ENDED, PASSES, data, deadlock, me, size


@deadlock(
    2,
    CYCLE,
    (0, 1),
    "rank 0 waits for rank 1 to receive, and rank 1 waits for rank 0 to receive",
    "send to rank 1, (4,) float32",
    "broken_messages.py:",
    "in head_to_head_sends",
    "Both wait in a send, which is done only when it is received. Let one of the two receive "
    "before it sends, or give the send and the recv of each rank to batch_isend_irecv.",
    if_buffered=PASSES,
)
def head_to_head_sends() -> None:
    """Both ranks send before they receive, which works as long as sends are buffered."""
    dist.send(data(), 1 - me())
    dist.recv(data(), 1 - me())


@deadlock(
    2,
    CYCLE,
    (0, 1),
    "send to rank 1, (4,) float32, tag 1",
    "Rank 0 sends to rank 1 with tag 1, but rank 1 receives with tag 2: give both the same tag, or",
    if_buffered=ENDED,
)
def two_tags() -> None:
    """The send and its recv have different tags."""
    if me() == 0:
        dist.send(data(), 1, tag=1)
    else:
        dist.recv(data(), 0, tag=2)


@deadlock(
    3,
    CYCLE,
    (0, 1),
    "recv from rank 0, (4,) float32, on the group of ranks 0 and 1",
    "Rank 0 sends to rank 1 on the group of ranks 0-2, but rank 1 receives on the group of ranks "
    "0 and 1: give both the same group.",
    if_buffered=ENDED,
)
def two_groups_for_one_message() -> None:
    """The recv passes a group, and the send omits it."""
    pair = dist.new_group([0, 1])
    if me() == 0:
        dist.send(data(), 1)
    elif me() == 1:
        dist.recv(data(), 0, group=pair)


@deadlock(
    3,
    CYCLE,
    (1,),
    "rank 1 waits for itself to receive",
    "A message to oneself needs both ends",
    if_buffered=PASSES,
)
def waits_for_itself() -> None:
    """A rank sends to itself, and waits before it has posted the receive."""
    if me() == 1:
        dist.isend(data(), 1).wait()
        dist.irecv(data(), 1).wait()


@deadlock(
    3,
    CYCLE,
    (0, 1, 2),
    "rank 0 waits for rank 1 to receive, rank 1 waits for rank 2 to send, and rank 2 waits for "
    "rank 0 to send",
    "Find an order in which one of them can go first",
    if_buffered=PASSES,
)
def no_one_can_go_first() -> None:
    """Every send has its recv, but their order leaves no rank that can go first."""
    if me() == 0:
        dist.send(data(), 1)
        dist.send(data(), 2)
    elif me() == 1:
        dist.recv(data(), 2)
        dist.recv(data(), 0)
    else:
        dist.recv(data(), 0)
        dist.send(data(), 1)


@deadlock(
    4,
    CYCLE,
    (0, 1, 2, 3),
    "but rank 1 receives from rank 2: is one of the peers wrong?",
)
def batch_with_one_neighbour_for_both() -> None:
    """Every rank batches its send and recv, but names its right neighbour as the peer of both."""
    right = (me() + 1) % size()
    ops = [dist.P2POp(dist.isend, data(), right), dist.P2POp(dist.irecv, data(), right)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


@deadlock(
    4,
    ENDED,
    (2,),
    "Rank 1 sends to rank 2, and rank 3 waits for rank 1 to send. Inside the group of ranks 1-3, "
    "rank 3 is number 2, but dst= counts all ranks: is group_dst=2 meant?",
    if_buffered=CYCLE,
)
def number_inside_the_group() -> None:
    """Rank 1 numbers its peer within the group, but passes dst= instead of group_dst=."""
    group = dist.new_group([1, 2, 3])
    if me() == 1:
        dist.send(data(), dst=2, group=group)
        dist.recv(data(), src=3, group=group)
    elif me() == 3:
        dist.recv(data(), group_src=0, group=group)
        dist.send(data(), group_dst=0, group=group)
