"""Evaluation under if rank == 0: the others go on to the next epoch.

rejected by: test_training_is_that_of_one_process
phrase: mismatch: all_reduce with size
"""

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
        if self.log.rank == 0:
            return super()._finish_epoch(epoch, losses, test_data, images_per_s)
        return EpochResult(epoch + 1, losses, 0.0, 0.0, images_per_s)
