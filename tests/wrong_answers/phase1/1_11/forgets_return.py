"""Makes the step, and keeps the loss to itself.

rejected by: test_steps_are_those_of_one_process
phrase: train_step returned None: is there a return?
"""

from typing import Any

import torch
from torch import nn

from solutions.phase1_data_parallel.data_loader import Batch
from solutions.phase1_data_parallel.trainer import train_step as _train_step


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, **options: Any
) -> None:
    _train_step(model, optimizer, batch, **options)
