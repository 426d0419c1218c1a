"""A rank with an empty batch leaves early; the others wait for its all-reduce.

rejected by: test_steps_are_those_of_one_process
outcome: hang
phrase: rank 1
"""

import torch
from torch import nn

from solutions.phase1_data_parallel import trainer
from solutions.phase1_data_parallel.collectives import AllReduce, Group, native_all_reduce
from solutions.phase1_data_parallel.data_loader import Batch
from solutions.phase1_data_parallel.trainer import AverageGradients, average_gradients

_right = trainer.train_step


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    all_reduce: AllReduce = native_all_reduce,
    average: AverageGradients = average_gradients,
    group: Group = None,
) -> float:
    if not len(batch[1]):
        return 0.0
    given = {"all_reduce": all_reduce, "average": average, "group": group}
    return _right(model, optimizer, batch, **given)
