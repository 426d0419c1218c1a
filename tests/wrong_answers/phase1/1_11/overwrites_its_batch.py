"""The batch is zero after the step.

rejected by: test_steps_are_those_of_one_process
phrase: has changed the inputs and targets of its batch
"""

from typing import Any

import torch
from torch import nn

from solutions.phase1_data_parallel.data_loader import Batch
from solutions.phase1_data_parallel.trainer import train_step as _train_step


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, **options: Any
) -> float:
    loss = _train_step(model, optimizer, batch, **options)
    for tensor in batch:
        tensor.zero_()
    return loss
