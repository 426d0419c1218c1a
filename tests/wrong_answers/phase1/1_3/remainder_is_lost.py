"""10 rows on 4 ranks are 2, 2, 2, 2: the last two are nobody's.

rejected by: test_every_rank_gets_its_rows
phrase: 10 rows on 4 ranks are 3, 3, 2, 2
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
    header = [_describe(batch) if rank == src else None]
    dist.broadcast_object_list(header, group=group, group_src=src)
    if isinstance(header[0], str):
        raise ValueError(header[0])
    rows = header[0][0][0][0] // world_size
    if rank == src:
        for to in range(world_size):
            for tensor in batch:
                if to != src:
                    part = tensor[to * rows : (to + 1) * rows].contiguous()
                    dist.send(part, group=group, group_dst=to)
        start = rank * rows
        return batch[0][start : start + rows], batch[1][start : start + rows]
    parts = [torch.empty((rows, *shape[1:]), dtype=dtype) for shape, dtype in header[0]]
    for part in parts:
        dist.recv(part, group=group, group_src=src)
    return parts[0], parts[1]
