"""Trains, and keeps the history to itself.

rejected by: test_training_is_that_of_one_process
phrase: fit returned None: is there a return?
"""

from typing import Any

from solutions.phase1_data_parallel import trainer


class Trainer(trainer.Trainer):
    def fit(self, *args: Any, **options: Any) -> None:
        super().fit(*args, **options)
