"""The seconds of the evaluation are part of those of the training.

rejected by: test_the_speed_is_that_of_all_ranks
phrase: without those of the evaluation
"""

import time
from dataclasses import replace
from typing import Any

from solutions.phase1_data_parallel import trainer
from solutions.phase1_data_parallel.trainer import EpochResult


class Trainer(trainer.Trainer):
    def _finish_epoch(
        self, epoch: int, losses: tuple[float, ...], test_data: Any, images_per_s: float
    ) -> EpochResult:
        start = time.perf_counter()
        result = super()._finish_epoch(epoch, losses, test_data, images_per_s)
        seconds = time.perf_counter() - start
        return replace(result, images_per_s=1 / (1 / images_per_s + seconds / 24))
