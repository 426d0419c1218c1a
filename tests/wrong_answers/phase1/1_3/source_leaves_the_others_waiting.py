"""The source raises, and the others wait for its header.

rejected by: test_every_rank_hears_of_a_wrong_batch
outcome: hang
phrase: rank
"""

import torch
import torch.distributed as dist

from solutions.phase1_data_parallel.data_loader import (
    Batch,
    _describe,
    _empty_part,
    _send_parts,
)


def scatter_batch(
    batch: Batch | None,
    src: int = 0,
    *,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> Batch:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    header = [_describe(batch) if rank == src else None]
    if isinstance(header[0], str):
        raise ValueError(header[0])
    dist.broadcast_object_list(header, group=group, group_src=src)
    if rank == src:
        return _send_parts(batch, src, group)
    images, labels = (_empty_part(s, t, rank, world_size, device) for s, t in header[0])
    for part in (images, labels):
        if part.numel():
            dist.recv(part, group=group, group_src=src)
    return images, labels
