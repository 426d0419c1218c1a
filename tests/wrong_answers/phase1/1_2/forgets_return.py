"""Builds the loader, and keeps it to itself.

rejected by: test_batches_of_a_step_are_one_global_batch
phrase: build_loader returned None: is there a return?
"""

from typing import Any

from solutions.phase1_data_parallel.data_loader import build_loader as _build_loader


def build_loader(*args: Any, **options: Any) -> None:
    _build_loader(*args, **options)
