"""Eight collectives: what each rank holds before the call, and after it.

torchrun --nproc-per-node 4 examples/first_steps/collectives.py
distlab sim --ranks 4 examples/first_steps/collectives.py

Every rank has a tensor with a part for each rank. ``b2`` is part 2 of rank 1, whose letter is b;
``Σ2`` is the sum of part 2 over all ranks.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = 0  # the rank that a broadcast, scatter, gather or reduce begins or ends with


def broadcast(x: Tensor) -> Tensor:
    """Copy the root's tensor to all ranks."""
    dist.broadcast(x, src=ROOT)
    return x


def scatter(x: Tensor) -> Tensor:
    """Deal the parts of the root's tensor out to the ranks."""
    part = x.new_empty(1)
    dist.scatter(part, [*x.chunk(len(x))] if dist.get_rank() == ROOT else None, src=ROOT)
    return part


def gather(part: Tensor) -> Tensor:
    """Collect a part from every rank on the root."""
    parts = part.new_zeros(dist.get_world_size())
    dist.gather(part, [*parts.chunk(len(parts))] if dist.get_rank() == ROOT else None, dst=ROOT)
    return parts


def all_gather(part: Tensor) -> Tensor:
    """Collect a part from every rank on all ranks."""
    parts = part.new_empty(dist.get_world_size())
    dist.all_gather([*parts.chunk(len(parts))], part)
    return parts


def reduce(x: Tensor) -> Tensor:
    """Add up all ranks' tensors on the root; on the others, nothing is promised."""
    dist.reduce(x, dst=ROOT)
    return x if dist.get_rank() == ROOT else torch.zeros_like(x)


def all_reduce(x: Tensor) -> Tensor:
    """Add up all ranks' tensors on all ranks."""
    dist.all_reduce(x)
    return x


def reduce_scatter(x: Tensor) -> Tensor:
    """Add up all ranks' tensors, and leave each rank one part of the sum."""
    part = x.new_empty(1)
    dist.reduce_scatter(part, [*x.chunk(len(x))])
    return part


def all_to_all(x: Tensor) -> Tensor:
    """Send a part of every rank's tensor to each rank."""
    parts = torch.empty_like(x)
    dist.all_to_all_single(parts, x)
    return parts


def whole() -> Tensor:
    """Return this rank's tensor; each rank's part is a bit of its own, so that sums keep all."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return torch.tensor([1 << (world_size * part + rank) for part in range(world_size)])


def at_root() -> Tensor:
    """Return the root's tensor; on other ranks, zeros."""
    return whole() * (dist.get_rank() == ROOT)


def one_part() -> Tensor:
    """Return the part of this rank's tensor that has the rank's number."""
    return whole()[dist.get_rank()].reshape(1)


COLLECTIVES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]] = {
    "broadcast": (broadcast, at_root),
    "scatter": (scatter, at_root),
    "gather": (gather, one_part),
    "all-gather": (all_gather, one_part),
    "reduce": (reduce, whole),
    "all-reduce": (all_reduce, whole),
    "reduce-scatter": (reduce_scatter, whole),
    "all-to-all": (all_to_all, whole),
}


def labels(x: Tensor) -> list[str]:
    """Name each part of a tensor that a rank holds: a0, b2, Σ1, or nothing for a zero."""
    world_size = dist.get_world_size()
    slots = [""] * world_size
    for index, value in enumerate(x.tolist()):
        bits = [bit for bit in range(world_size**2) if value >> bit & 1]
        if bits:
            part = bits[0] // world_size  # where a tensor of a single part is shown
            letter = chr(ord("a") + bits[0] % world_size) if len(bits) == 1 else "Σ"
            slots[index if len(x) == world_size else part] = f"{letter}{part}"
    return slots


def run_all() -> dict[str, tuple[list[str], list[str]]]:
    """Call each collective; return the labels of this rank's parts before and after."""
    shown = {}
    for name, (collective, start) in COLLECTIVES.items():
        before = labels(start())
        shown[name] = before, labels(collective(start()))
    return shown


def main() -> None:
    """Print on rank 0 what every rank holds before and after each collective."""
    dist.init_process_group()
    ranks = [run_all()] * dist.get_world_size()
    dist.all_gather_object(ranks, ranks[0])
    if dist.get_rank() == 0:
        for name in COLLECTIVES:
            print(name)
            for rank, shown in enumerate(ranks):
                before, after = (" ".join(f"{label:2}" for label in side) for side in shown[name])
                print(f"  rank {rank}  {before}  ->  {after}".rstrip())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
