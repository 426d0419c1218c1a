"""A mean of the batches' means: the last, smaller batch counts too much.

rejected by: test_the_batch_size_does_not_change_the_result
phrase: divide once at the end
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset

from solutions.phase1_data_parallel.collectives import Group
from solutions.phase1_data_parallel.data_loader import Sample
from solutions.phase1_data_parallel.trainer import Evaluation, _evaluation_mode


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Dataset[Sample],
    *,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> Evaluation:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = Subset(dataset, range(rank, len(dataset), size))
    totals = torch.zeros(3, dtype=torch.float64)
    with _evaluation_mode(model):
        for inputs, targets in DataLoader(mine, batch_size=batch_size):
            logits = model(inputs)
            totals[0] += cross_entropy(logits, targets)
            totals[1] += (logits.argmax(dim=-1) == targets).double().mean()
            totals[2] += 1
    dist.all_reduce(totals, group=group)
    loss, accuracy, batches = totals.tolist()
    return Evaluation(loss / batches, accuracy / batches, len(dataset))
