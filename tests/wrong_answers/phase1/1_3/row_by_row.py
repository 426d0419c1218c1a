"""A message for every row: right bytes, and α for each of them.

rejected by: test_only_the_rows_travel
phrase: Send a rank's rows as one tensor
"""

import torch
import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.data_loader import Batch, _describe


def scatter_batch(
    batch: Batch | None,
    src: int = 0,
    *,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> Batch:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    header = [_describe(batch) if rank == src else ""]
    dist.broadcast_object_list(header, group=group, group_src=src)
    if isinstance(header[0], str):
        raise ValueError(header[0])
    if rank == src:
        images, labels = (tensor.tensor_split(n) for tensor in batch)
        for to in range(n):
            for part in (images[to], labels[to]):
                if to != src:
                    _send(part.contiguous(), to, group)
        return images[src], labels[src]
    (shape, dtype), (label_shape, label_dtype) = header[0]
    rows = shape[0] // n + (rank < shape[0] % n)
    images = torch.empty((rows, *shape[1:]), dtype=dtype)
    labels = torch.empty((rows, *label_shape[1:]), dtype=label_dtype)
    for part in (images, labels):
        _receive(part, src, group)
    return images, labels


def _send(part: Tensor, dst: int, group: dist.ProcessGroup | None) -> None:
    for row in part:
        dist.send(row, group=group, group_dst=dst)


def _receive(part: Tensor, src: int, group: dist.ProcessGroup | None) -> None:
    for row in part:
        dist.recv(row, group=group, group_src=src)
