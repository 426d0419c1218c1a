"""The whole share in one forward pass, whatever fits in memory.

rejected by: test_the_batch_size_does_not_change_the_result
phrase: what fits in memory
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
        for inputs, targets in _batches_on(DataLoader(mine, batch_size=max(len(mine), 1)), device):
            logits = model(inputs)
            correct = (logits.argmax(dim=-1) == targets).sum()
            totals += torch.stack([_loss_sum(logits, targets).double(), correct, _count(targets)])
    dist.all_reduce(totals, group=group)
    loss, num_correct, num_targets = totals.tolist()
    return Evaluation(loss / num_targets, num_correct / num_targets, int(num_targets))
