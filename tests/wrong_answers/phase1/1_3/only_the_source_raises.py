"""The source raises before it has told anybody.

rejected by: test_every_rank_hears_of_a_wrong_batch
outcome: failed
phrase: rank 0 raises none
"""

import torch
import torch.distributed as dist

from solutions.phase1_data_parallel.data_loader import Batch


def scatter_batch(
    batch: Batch | None,
    src: int = 0,
    *,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> Batch:
    if dist.get_rank(group) == src and (batch is None or len(batch[0]) != len(batch[1])):
        raise ValueError("no batch")
    return torch.zeros(1), torch.zeros(1)
