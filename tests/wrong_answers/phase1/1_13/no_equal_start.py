"""The models are not made equal at the start.

rejected by: test_training_is_that_of_one_process
phrase: one process from rank 0's weights
"""

import time

from torch.utils.data import Dataset

from solutions.phase1_data_parallel import trainer
from solutions.phase1_data_parallel.data_loader import Sample, build_loader
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
        loader = build_loader(train_data, global_batch_size, seed=seed, group=self.group)
        history = []
        for epoch in range(epochs):
            start = time.perf_counter()
            losses = self._train_epoch(loader, epoch)
            speed = len(losses) * global_batch_size / (time.perf_counter() - start)
            history.append(self._finish_epoch(epoch, losses, test_data, speed))
        return history
