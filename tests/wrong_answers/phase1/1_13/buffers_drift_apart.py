"""Evaluates each rank's own running statistics.

rejected by: test_batch_norm_is_judged_with_the_same_statistics
phrase: Running statistics follow
"""

from torch.utils.data import Dataset

from solutions.phase1_data_parallel import trainer
from solutions.phase1_data_parallel.data_loader import Sample
from solutions.phase1_data_parallel.trainer import EpochResult, evaluate


class Trainer(trainer.Trainer):
    def _finish_epoch(
        self,
        epoch: int,
        losses: tuple[float, ...],
        test_data: Dataset[Sample],
        images_per_s: float,
    ) -> EpochResult:
        test = evaluate(self.model, test_data, device=self.device, group=self.group)
        result = EpochResult(epoch + 1, losses, test.loss, test.accuracy, images_per_s)
        self.log.info(f"epoch {result.epoch}  loss {result.train_loss:.4f}")
        return result
