"""Adds up the losses in float32, as the tensor of a list is.

right
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
    totals = torch.tensor([loss_sum.item(), targets.numel()])
    all_reduce(totals, group)
    total_loss, num_targets = totals.tolist()
    if not num_targets:
        raise ValueError("the batches of all ranks are empty")
    (loss_sum * (dist.get_world_size(group) / num_targets)).backward()
    average(model, all_reduce, group)
    optimizer.step()
    return total_loss / num_targets
