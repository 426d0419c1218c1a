"""One all-reduce for each parameter, whatever average it was given.

rejected by: test_seed_and_average_are_used
phrase: Pass self.average and self.all_reduce on
"""

from solutions.phase1_data_parallel import trainer
from solutions.phase1_data_parallel.data_loader import Batch
from solutions.phase1_data_parallel.trainer import train_step


class Trainer(trainer.Trainer):
    def _step(self, batch: Batch) -> float:
        return train_step(
            self.model, self.optimizer, batch, all_reduce=self.all_reduce, group=self.group
        )
