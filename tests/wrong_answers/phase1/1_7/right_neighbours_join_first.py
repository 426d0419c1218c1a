"""MPICH's way with odd numbers: among the first 2r ranks, even ones join the odd one beside them.

right
"""

import torch
import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group


def all_reduce_recursive_doubling(x: Tensor, group: Group = None) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    core = 1 << (size.bit_length() - 1)
    extra, other = size - core, torch.empty_like(x)
    if rank < 2 * extra and rank % 2 == 0:
        dist.send(x, group=group, group_dst=rank + 1)
        dist.recv(x, group=group, group_src=rank + 1)
        return
    if rank < 2 * extra:
        dist.recv(other, group=group, group_src=rank - 1)
        x.add_(other)
    place = rank // 2 if rank < 2 * extra else rank - extra
    for k in range(core.bit_length() - 1):
        partner = place ^ (1 << k)
        peer = 2 * partner + 1 if partner < extra else partner + extra
        arriving = dist.irecv(other, group=group, group_src=peer)
        dist.send(x, group=group, group_dst=peer)
        arriving.wait()
        x.add_(other)
    if rank < 2 * extra:
        dist.send(x, group=group, group_dst=rank - 1)
