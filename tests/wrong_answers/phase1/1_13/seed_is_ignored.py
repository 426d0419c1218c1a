"""Every run has the order of seed 0.

rejected by: test_seed_and_average_are_used
phrase: Pass seed on to build_loader
"""

from typing import Any

from solutions.phase1_data_parallel import trainer
from solutions.phase1_data_parallel.trainer import EpochResult


class Trainer(trainer.Trainer):
    def fit(self, *args: Any, seed: int = 0, **options: Any) -> list[EpochResult]:
        return super().fit(*args, **options)
