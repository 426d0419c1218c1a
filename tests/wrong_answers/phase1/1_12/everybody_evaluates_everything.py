"""Right, and N times the work.

rejected by: test_evaluation_is_that_of_one_process
phrase: each should be fetched once
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from solutions.phase1_data_parallel.collectives import Group
from solutions.phase1_data_parallel.data_loader import Sample
from solutions.phase1_data_parallel.trainer import (
    Evaluation,
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
    totals = torch.zeros(3, dtype=torch.float64)
    with _evaluation_mode(model):
        for inputs, targets in DataLoader(dataset, batch_size=batch_size):
            logits = model(inputs)
            correct = (logits.argmax(dim=-1) == targets).sum()
            totals += torch.stack([_loss_sum(logits, targets).double(), correct, _count(targets)])
    dist.all_reduce(totals, group=group)
    totals /= dist.get_world_size(group)
    loss, num_correct, count = totals.tolist()
    return Evaluation(loss / count, num_correct / count, int(count))
