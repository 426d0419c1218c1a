"""Rank 0 evaluates and adds up; the others have left.

rejected by: test_evaluation_is_that_of_one_process
outcome: hang
phrase: rank 0
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from solutions.phase1_data_parallel import trainer
from solutions.phase1_data_parallel.collectives import Group
from solutions.phase1_data_parallel.data_loader import Sample
from solutions.phase1_data_parallel.trainer import Evaluation

_right = trainer.evaluate


def evaluate(
    model: nn.Module,
    dataset: Dataset[Sample],
    *,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> Evaluation:
    if dist.get_rank(group) == 0:
        return _right(model, dataset, batch_size=batch_size, device=device, group=group)
    return Evaluation(0.0, 0.0, 0)
