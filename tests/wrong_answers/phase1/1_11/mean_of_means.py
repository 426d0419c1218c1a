"""Each rank averages its own targets: right for equal batches only.

rejected by: test_steps_are_those_of_one_process
phrase: batches of [3, 1]
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from solutions.phase1_data_parallel.collectives import AllReduce, Group, native_all_reduce
from solutions.phase1_data_parallel.data_loader import Batch
from solutions.phase1_data_parallel.trainer import AverageGradients, average_gradients


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
    loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    average(model, all_reduce, group)
    optimizer.step()
    total = loss.detach().clone()
    all_reduce(total, group)
    return float(total / dist.get_world_size(group))
