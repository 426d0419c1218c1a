"""Broken programs: a peer returns, is killed, raises, or never sets a key."""

import time

import torch
import torch.distributed as dist
from catalogue import ENDED, KEY, PASSES, data, deadlock, me, rank_error
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

from distlab.sim import Faults


@deadlock(
    4,
    ENDED,
    (1, 2, 3),
    "rank 0 waits in barrier (call 1 of ranks 0-3) for ranks 1-3, but ranks 1-3 have returned",
    "ranks 1-3 returned without communicating",
    "a call under an `if` on the rank?",
)
def barrier_under_an_if() -> None:
    """Only rank 0 saves the checkpoint, and only rank 0 reaches the barrier after it."""
    if me() == 0:
        dist.barrier()


@deadlock(
    3,
    ENDED,
    (1,),
    "ranks 0 and 2 wait in all_reduce (call 4 of ranks 0-2) for rank 1, but rank 1 has returned",
    "4 times on ranks 0 and 2 and 3 times on rank 1: do they have equally many batches, or does ",
    "rank 1 returned after 3 calls, the last: all_reduce (call 3 of ranks 0-2), (4,) float32 "
    "broken_ends.py:",
)
def uneven_batches() -> None:
    """One rank has one batch fewer than the others."""
    for _ in range(3 if me() == 1 else 4):
        dist.all_reduce(data())


@deadlock(2, ENDED, (1,), "for rank 1, but rank 1 has returned")
def uneven_batches_in_ddp() -> None:
    """DistributedDataParallel's hooks call the collectives, and one rank has one batch fewer."""
    model = DistributedDataParallel(nn.Linear(2, 1))
    for _ in range(2 - me()):
        model(torch.ones(1, 2)).sum().backward()


@deadlock(
    3,
    ENDED,
    (1,),
    "rank 0 waits for rank 1 to send, but rank 1 has returned",
    "Rank 0 has taken a message of rank 1 with the recv from any rank at broken_ends.py:",
    "was it meant for the recv from rank 1? If not: is a send missing on rank 1",
)
def any_recv_takes_what_a_named_one_waits_for() -> None:
    """The recv from any rank takes rank 1's only message, and nothing receives rank 2's."""
    if me() == 0:
        dist.recv(data())
        dist.recv(data(), 1)
    else:
        time.sleep(me() - 1)
        dist.send(data(), 0)


@deadlock(
    2,
    ENDED,
    (1,),
    "rank 0 waits for rank 1 to receive, but rank 1 has returned",
    "Is a recv missing on rank 1",
    "Or does rank 0 send once too often?",
    if_buffered=PASSES,
)
def send_that_nobody_receives() -> None:
    """A send has no matching recv, which would go unnoticed if the sender did not wait."""
    if me() == 0:
        dist.isend(data(), 1).wait()


@deadlock(
    4,
    ENDED,
    (2,),
    "ranks 0, 1 and 3 wait in all_reduce (call 3 of ranks 0-3) for rank 2, but rank 2 was killed",
    "rank 2 killed by a fault",
    "A killed rank never answers",
    faults=Faults(kill_ranks={2: 0.25}),
)
def loses_a_rank() -> None:
    """A fault kills a rank while it computes its third step."""
    for _ in range(4):
        time.sleep(0.1)
        dist.all_reduce(data())


@deadlock(
    3,
    KEY,
    (1, 2),
    "ranks 1 and 2 wait for the key 'ready', which no rank has set",
    "There is a key 'raedy', which rank 0 has set at broken_ends.py:",
    "in misspelt_key: is one misspelled?",
)
def misspelt_key() -> None:
    """Rank 0 misspells the key that the others wait for, and continues."""
    store = _get_default_store()
    if me() == 0:
        store.set("raedy", "1")
    else:
        store.wait(["ready"])


@deadlock(
    3,
    ENDED,
    (0,),
    "ranks 1 and 2 wait in broadcast (call 1 of ranks 0-2) for rank 0, but rank 0 has returned",
    "On rank 0, broadcast raised RuntimeError: broadcast needs contiguous tensors",
    "The exception was caught, so the other ranks do not know.",
)
def source_alone_is_refused() -> None:
    """torch rejects the source's tensor; the source catches the error and returns."""
    x = torch.zeros(4, 4)
    try:
        dist.broadcast(x.t()[:2] if me() == 0 else x[:2], 0)
    except RuntimeError:
        return


@rank_error(
    4,
    "ValueError",
    (2,),
    "rank 0 is not in the group of ranks 2 and 3. src=, dst= and peer= count all ranks",
    "give group_src=",
)
def root_counted_inside_the_group() -> None:
    """src= is a global rank, even when a group is given."""
    group = dist.new_group([2, 3])
    if me() >= 2:
        dist.broadcast(data(), src=0, group=group)


@rank_error(2, "ValueError", (), "Invalid destination rank")
def blocking_send_to_itself() -> None:
    """torch rejects a blocking send from a rank to itself."""
    dist.send(data(), me())
