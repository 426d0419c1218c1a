"""Each rank reports its own times.

rejected by: test_the_slowest_rank_counts_in_the_median_run
phrase: the slowest rank counts
"""

import time

import torch

from solutions.phase1_data_parallel.collectives import (
    AllReduce,
    Group,
    all_reduce_recursive_doubling,
)


def _slowest_rank_s(
    run: AllReduce, size_bytes: int, repeats: int, device: torch.device | str, group: Group
) -> float:
    x, mine = torch.zeros(size_bytes // 4), []
    run(x, group)
    for _ in range(repeats):
        all_reduce_recursive_doubling(torch.zeros(1), group)
        start = time.perf_counter()
        run(x, group)
        mine.append(time.perf_counter() - start)
    return sorted(mine)[repeats // 2]
