"""Counts the samples of a batch; a sequence has a target at every position.

rejected by: test_sequences_count_every_position
phrase: the first loss of one process
"""

import torch
import torch.distributed as dist
from torch import nn

from solutions.phase1_data_parallel.collectives import AllReduce, Group, native_all_reduce
from solutions.phase1_data_parallel.data_loader import Batch
from solutions.phase1_data_parallel.trainer import AverageGradients, _loss_sum, average_gradients


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    all_reduce: AllReduce = native_all_reduce,
    average: AverageGradients = average_gradients,
    group: Group = None,
) -> float:
    inputs, targets = batch
    optimizer.zero_grad()
    loss_sum = _loss_sum(model(inputs), targets)
    totals = torch.stack([loss_sum.detach().double(), torch.tensor(len(targets))])
    all_reduce(totals, group)
    loss, count = totals.tolist()
    if not count:
        raise ValueError("no rank has a target")
    (loss_sum * (dist.get_world_size(group) / count)).backward()
    average(model, all_reduce, group)
    optimizer.step()
    return loss / count
