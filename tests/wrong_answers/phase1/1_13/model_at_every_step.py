"""Broadcasts the model before each step, which hides that ranks drift apart.

rejected by: test_the_speed_is_that_of_all_ranks
phrase: The model is broadcast once
"""

from solutions.phase1_data_parallel import trainer
from solutions.phase1_data_parallel.data_loader import Batch
from solutions.phase1_data_parallel.trainer import broadcast_parameters


class Trainer(trainer.Trainer):
    def _step(self, batch: Batch) -> float:
        broadcast_parameters(self.model, group=self.group)
        return super()._step(batch)
