"""No loader and no batches: all samples of the rank are stacked.

rejected by: test_the_batch_size_does_not_change_the_result
phrase: what fits in memory
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from solutions.phase1_data_parallel.collectives import Group
from solutions.phase1_data_parallel.data_loader import Sample
from solutions.phase1_data_parallel.trainer import Evaluation, _count, _loss_sum


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
    modes = {module: module.training for module in model.modules()}
    model.eval()
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    mine = [dataset[index] for index in range(rank, len(dataset), n)]
    totals = torch.zeros(3, dtype=torch.float64)
    if mine:
        inputs, targets = (torch.stack(column) for column in zip(*mine, strict=True))
        logits = model(inputs)
        correct = (logits.argmax(dim=-1) == targets).sum()
        totals += torch.stack([_loss_sum(logits, targets).double(), correct, _count(targets)])
    for module, mode in modes.items():
        module.training = mode
    dist.all_reduce(totals, group=group)
    loss, num_correct, num_targets = totals.tolist()
    return Evaluation(loss / num_targets, num_correct / num_targets, int(num_targets))
