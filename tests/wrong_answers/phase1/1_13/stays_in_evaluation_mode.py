"""Never switches to training mode.

rejected by: test_batch_norm_is_judged_with_the_same_statistics
phrase: switch to training
"""

from solutions.phase1_data_parallel import trainer
from solutions.phase1_data_parallel.data_loader import ShardLoader


class Trainer(trainer.Trainer):
    def _train_epoch(self, loader: ShardLoader, epoch: int) -> tuple[float, ...]:
        loader.set_epoch(epoch)
        return tuple(self._step(batch) for batch in loader)
