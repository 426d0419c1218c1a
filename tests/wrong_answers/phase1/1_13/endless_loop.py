"""Trains until a loss that never comes.

rejected by: test_a_batch_that_cannot_be_shared_stops_the_training
outcome: hang
phrase: time is up after 2 s of computing: simulated rank
"""

from torch.utils.data import Dataset

from solutions.phase1_data_parallel import trainer
from solutions.phase1_data_parallel.data_loader import Sample
from solutions.phase1_data_parallel.trainer import EpochResult


class Trainer(trainer.Trainer):
    def fit(
        self,
        train_data: Dataset[Sample],
        test_data: Dataset[Sample],
        *,
        epochs: int,
        global_batch_size: int,
        seed: int = 0,
    ) -> list[EpochResult]:
        loss = 1.0
        while loss > 0:
            loss += 0.0
        return []
