"""Everybody gets everything and keeps its rows: right values, N times the bytes.

rejected by: test_only_the_rows_travel
phrase: Every row goes to one rank only
"""

import torch
import torch.distributed as dist

from solutions.phase1_data_parallel.data_loader import Batch, _describe


def scatter_batch(
    batch: Batch | None,
    src: int = 0,
    *,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> Batch:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    header = [_describe(batch) if rank == src else None, batch]
    dist.broadcast_object_list(header, group=group, group_src=src)
    if isinstance(header[0], str):
        raise ValueError(header[0])
    images, labels = (tensor.tensor_split(world_size)[rank] for tensor in header[1])
    return images, labels
