"""Sends to one rank after the other, blocking; the header too goes from hand to hand.

right
"""

import torch
import torch.distributed as dist

from solutions.phase1_data_parallel.data_loader import Batch, _describe, _empty_part


def scatter_batch(
    batch: Batch | None,
    src: int = 0,
    *,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> Batch:
    me, n = dist.get_rank(group), dist.get_world_size(group)
    if me == src:
        header = _describe(batch)
        for to in (rank for rank in range(n) if rank != src):
            dist.send_object_list([header], group=group, group_dst=to)
            if isinstance(header, str) or batch is None:
                continue
            for tensor in batch:
                part = torch.tensor_split(tensor, n)[to]
                if len(part):
                    dist.send(
                        part.clone(memory_format=torch.contiguous_format), group=group, group_dst=to
                    )
        if isinstance(header, str) or batch is None:
            raise ValueError(header)
        return batch[0].tensor_split(n)[me].clone(), batch[1].tensor_split(n)[me].clone()
    heard = [None]
    dist.recv_object_list(heard, group=group, group_src=src)
    if isinstance(heard[0], str):
        raise ValueError(heard[0])
    parts = [_empty_part(shape, dtype, me, n, device) for shape, dtype in heard[0]]
    for part in parts:
        if len(part):
            dist.recv(part, group=group, group_src=src)
    return parts[0], parts[1]
