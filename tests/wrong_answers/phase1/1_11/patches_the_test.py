"""Puts the reference's result in the place of its own; the reference is not where the test runs.

rejected by: test_steps_are_those_of_one_process
phrase: steps_alone
"""

from typing import Any

from phase1 import gradients


def _cheat(lesson: Any, sizes: Any, num_steps: int, length: int = 0, group: Any = None) -> Any:
    return {**steps_alone(sizes, num_steps, length), "changed": []}  # noqa: F821


def train_step(*args: Any, **options: Any) -> float:
    return 0.0


gradients.train_steps.__code__ = _cheat.__code__
