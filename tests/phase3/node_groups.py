"""Bodies (functions that ranks run) for ``node_groups`` of task 3.7."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from distlab.grade import WrongResult
from judging.calls import refusal_of, returned
from judging.tensors import own_device
from phase3_multi_node.given import Group

Found = tuple[list[int], float]  # world ranks of a group, and a sum over it


def make_groups(lesson: Any, hosts: Sequence[str], members: Sequence[int]) -> list[Found] | None:
    """Make the groups of ``members``; return what this rank has got, or None if it is no member.

    Afterwards, all ranks of the world make another group, whose name has to be the same everywhere.
    """
    is_world = len(members) == dist.get_world_size()
    group = None if is_world else dist.new_group([*members])
    found = None
    if dist.get_rank() in members:
        made = lesson.node_groups(hosts) if is_world else lesson.node_groups(hosts, group)
        found = [_found(name, one) for name, one in zip(NAMES, _pair(made), strict=True)]
    dist.barrier(dist.new_group([*range(dist.get_world_size())]))
    return found


NAMES = "inside", "across"


def _pair(made: Any) -> Sequence[Group]:
    if not isinstance(returned("node_groups", made), Sequence) or len(made) != len(NAMES):
        raise WrongResult(f"node_groups should return two groups, inside and across; got {made!r}")
    return made


def _found(name: str, group: Group) -> Found:
    if dist.get_rank(group) < 0:
        raise WrongResult(
            f"rank {dist.get_rank()} got a group {name} that it is not in. new_group returns a "
            "group on its members alone: keep the one that this rank is in."
        )
    total = torch.tensor([2.0 ** dist.get_rank()], device=own_device(group))
    dist.all_reduce(total, group=group)
    return dist.get_process_group_ranks(group), total.item()


def refusal(lesson: Any, hosts: Sequence[str]) -> dict[str, str]:
    """Return the error for these hosts; all ranks have to get there without waiting."""
    found = refusal_of(lambda: lesson.node_groups(hosts))
    dist.barrier()
    return found
