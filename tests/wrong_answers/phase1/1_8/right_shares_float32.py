"""Shares the times in float32: 7 digits are more than any clock gives.

right
"""

import time

import torch
import torch.distributed as dist

from solutions.phase1_data_parallel.collectives import (
    AllReduce,
    Group,
    all_reduce_naive,
    all_reduce_recursive_doubling,
)


def _slowest_rank_s(
    run: AllReduce, size_bytes: int, repeats: int, device: torch.device | str, group: Group
) -> float:
    x = torch.zeros(size_bytes // 4, device=device)
    run(x, group)
    mine = []
    for _ in range(repeats):
        all_reduce_recursive_doubling(torch.zeros(1), group)
        start = time.perf_counter()
        run(x, group)
        mine.append(time.perf_counter() - start)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    everybodys = torch.zeros(repeats, world_size)
    everybodys[:, rank] = torch.tensor(mine)
    all_reduce_naive(everybodys, group)
    return float(everybodys.max(dim=1).values.median())
