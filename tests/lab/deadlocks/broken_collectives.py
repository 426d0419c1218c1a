"""Broken programs: a rank is missing from a collective, or groups are used in different orders."""

import torch
import torch.distributed as dist
from catalogue import ENDED, MISSING, ORDER, data, deadlock, me
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


@deadlock(
    2,
    MISSING,
    (1,),
    "rank 0 waits in all_reduce (call 2 of ranks 0 and 1) for rank 1, but rank 1 waits for rank 0 "
    "to receive",
    if_buffered=ENDED,
)
def unused_parameter_on_one_rank() -> None:
    """Hooks reduce each gradient as it becomes ready, but one rank's loss omits a parameter."""
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    for parameter in (first, second):
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    loss = first.sum() + (second.sum() if me() == 0 else 0)
    loss.backward()
    if me() == 1:
        dist.send(loss.detach(), 0)
    else:
        dist.recv(loss.detach(), 1)


@deadlock(
    3,
    MISSING,
    (0,),
    "rank 0 waits for any rank to send",
    "Rank 0 cannot go on until some rank sends, and ranks 1 and 2 wait for rank 0 in this barrier: "
    "does rank 0 receive once too often?",
)
def server_without_an_end() -> None:
    """The parameter server listens forever; the workers wait for it in a barrier."""
    if me() == 0:
        while True:
            dist.recv(data())
    dist.send(data(), 0)
    dist.barrier()


@deadlock(
    3, MISSING, (2,), "barrier (call 1 of ranks 0-2) for rank 2", "rank 2 waits for rank 0 to send"
)
def monitored_barrier_without_one() -> None:
    """A monitored barrier also waits forever for a missing rank; the report names that rank."""
    if me() == 2:
        dist.recv(data(), 0)
    dist.monitored_barrier()


@deadlock(
    3,
    ORDER,
    (0, 1),
    "rank 0 waits in all_reduce (call 1 of ranks 0 and 1) for rank 1, and ranks 1 and 2 wait in "
    "all_reduce (call 1 of ranks 0-2) for rank 0",
    "use them in the same order",
)
def crossed_groups() -> None:
    """Rank 0 reduces over the pair first, and rank 1 over all ranks first."""
    pair = dist.new_group([0, 1])
    if me() == 0:
        dist.all_reduce(data(), group=pair)
    dist.all_reduce(data())
    if me() == 1:
        dist.all_reduce(data(), group=pair)


@deadlock(
    3,
    ORDER,
    (0, 1, 2),
    "rank 1 waits in barrier (call 1 of ranks 0-2) on the default group for ranks 0 and 2",
    "but not all equally often: let all ranks do both.",
)
def joins_again_alone() -> None:
    """Only rank 1 leaves the default group and joins another."""
    if me() == 1:
        dist.destroy_process_group()
        dist.init_process_group("gloo")
    dist.barrier()


@deadlock(
    4,
    ORDER,
    (0, 1, 2, 3),
    "ranks 0 and 1 barrier (call 1 of ranks 0-3)",
    "Ranks 0 and 1 wait on the 1st group of ranks 0-3 (made at broken_collectives.py:",
    "and ranks 2 and 3 wait on the 2nd group of ranks 0-3 (made at broken_collectives.py:",
    "These are two different groups of the same ranks",
)
def two_groups_of_the_same_ranks() -> None:
    """Two groups contain all ranks, and half of the ranks use them in the opposite order."""
    groups = [dist.new_group(range(4)), dist.new_group(range(4))]
    for group in groups if me() < 2 else reversed(groups):
        dist.barrier(group)


@deadlock(
    3,
    ENDED,
    (1,),
    "rank 0 waits in new_group of ranks 0 and 1 for rank 1, but rank 1 has returned",
    "Every rank of a group has to call new_group for it, and rank 1 returned without doing so.",
)
def group_made_by_one_rank() -> None:
    """Only rank 0 creates a group of two."""
    if me() == 0:
        dist.new_group([0, 1])


@deadlock(
    4,
    ORDER,
    (0, 1),
    "Or else: at broken_collectives.py:",
    "rank 0 calls all_reduce on ranks 0 and 1, and rank 1 calls it on ranks 0-3: is group= "
    "missing, or None, on rank 1?",
)
def group_forgotten_on_one_rank() -> None:
    """One rank omits group= and waits for the whole world."""
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][me() // 2]
    dist.all_reduce(data(), group=None if me() == 1 else half)
    dist.all_reduce(data())


@deadlock(
    4,
    ORDER,
    (0, 1, 2, 3),
    "ranks 0 and 3 wait on axis tp, and ranks 1 and 2 wait on axis dp, each for the next of 0, 1, "
    "3, 2, 0",
    "use them in the same order. Or is one of these calls on the wrong group?",
)
def axes_in_two_orders() -> None:
    """Two of the four ranks use the axes of a mesh in the opposite order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name in ("tp", "dp") if me() in (0, 3) else ("dp", "tp"):
        dist.all_reduce(data(), group=mesh.get_group(name))
