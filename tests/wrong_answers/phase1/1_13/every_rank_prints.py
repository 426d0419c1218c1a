"""print in place of the log.

rejected by: test_rank_0_alone_prints_a_line_an_epoch
phrase: rank 1 should print nothing
"""

from torch.utils.data import Dataset

from solutions.phase1_data_parallel import trainer
from solutions.phase1_data_parallel.data_loader import Sample
from solutions.phase1_data_parallel.trainer import EpochResult, _broadcast_all, evaluate


class Trainer(trainer.Trainer):
    def _finish_epoch(
        self,
        epoch: int,
        losses: tuple[float, ...],
        test_data: Dataset[Sample],
        images_per_s: float,
    ) -> EpochResult:
        _broadcast_all(list(self.model.buffers()), 0, self.group)
        test = evaluate(self.model, test_data, device=self.device, group=self.group)
        result = EpochResult(epoch + 1, losses, test.loss, test.accuracy, images_per_s)
        print(f"epoch {result.epoch}  loss {result.train_loss:.4f}")
        return result
