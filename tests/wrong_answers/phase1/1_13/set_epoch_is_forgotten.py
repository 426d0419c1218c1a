"""Every epoch has the order of the first.

rejected by: test_training_is_that_of_one_process
phrase: Call set_epoch before each
"""

from solutions.phase1_data_parallel import trainer
from solutions.phase1_data_parallel.data_loader import ShardLoader


class Trainer(trainer.Trainer):
    def _train_epoch(self, loader: ShardLoader, epoch: int) -> tuple[float, ...]:
        self.model.train()
        return tuple(self._step(batch) for batch in loader)
