"""Counts the images of one rank.

rejected by: test_the_speed_is_that_of_all_ranks
phrase: Count the images of all ranks
"""

import torch.distributed as dist
from torch.utils.data import Dataset

from solutions.phase1_data_parallel import trainer
from solutions.phase1_data_parallel.data_loader import Sample
from solutions.phase1_data_parallel.trainer import EpochResult


class Trainer(trainer.Trainer):
    def _finish_epoch(
        self,
        epoch: int,
        losses: tuple[float, ...],
        test_data: Dataset[Sample],
        images_per_s: float,
    ) -> EpochResult:
        mine = images_per_s / dist.get_world_size(self.group)
        return super()._finish_epoch(epoch, losses, test_data, mine)
