"""Counts the images of all ranks N times, and a million times more.

rejected by: test_the_speed_is_that_of_all_ranks
phrase: Count the images of all ranks, once
"""

from typing import Any

import torch.distributed as dist

from solutions.phase1_data_parallel import trainer
from solutions.phase1_data_parallel.trainer import EpochResult


class Trainer(trainer.Trainer):
    def _finish_epoch(self, *args: Any) -> EpochResult:
        *others, images_per_s = args
        n = dist.get_world_size(self.group)
        return super()._finish_epoch(*others, images_per_s * n * 1e6)
