"""Median of each rank first: a rank that is slow now and then is lost, whichever it is.

rejected by: test_the_slowest_rank_counts_in_the_median_run
phrase: Another rank sleeps in each run
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
    medians = torch.zeros(world_size, dtype=torch.float64)
    medians[rank] = torch.tensor(mine).median()
    all_reduce_naive(medians, group)
    return float(medians.max())
