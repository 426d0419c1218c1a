"""A table of 2.4 MB for three numbers.

rejected by: test_evaluating_takes_one_small_all_reduce
phrase: three sums of 8 bytes
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from solutions.phase1_data_parallel.collectives import Group
from solutions.phase1_data_parallel.data_loader import Sample
from solutions.phase1_data_parallel.trainer import (
    Evaluation,
    _batches_on,
    _count,
    _evaluation_mode,
    _loss_sum,
)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Dataset[Sample],
    *,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> Evaluation:
    if not len(dataset):
        raise ValueError("the data set is empty")
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    mine = Subset(dataset, range(rank, len(dataset), n))
    totals = torch.zeros(3, dtype=torch.float64)
    with _evaluation_mode(model):
        for inputs, targets in _batches_on(DataLoader(mine, batch_size=batch_size), device):
            logits = model(inputs)
            correct = (logits.argmax(dim=-1) == targets).sum()
            totals += torch.stack([_loss_sum(logits, targets).double(), correct, _count(targets)])
    table = torch.zeros(100_000, 3, dtype=torch.float64)
    table[rank] = totals
    dist.all_reduce(table, group=group)
    totals = table.sum(dim=0)
    loss, num_correct, num_targets = totals.tolist()
    return Evaluation(loss / num_targets, num_correct / num_targets, int(num_targets))
