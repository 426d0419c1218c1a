"""No run is left out: the first, which opens connections, is timed.

rejected by: test_the_slowest_rank_counts_in_the_median_run
phrase: the first is not timed
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
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    x = torch.zeros(size_bytes // 4)
    mine = torch.zeros(repeats, world_size, dtype=torch.float64)
    for repeat in range(repeats):
        all_reduce_recursive_doubling(torch.zeros(1), group)
        start = time.perf_counter()
        run(x, group)
        mine[repeat, rank] = time.perf_counter() - start
    all_reduce_naive(mine, group)
    return float(mine.max(dim=1).values.median())
