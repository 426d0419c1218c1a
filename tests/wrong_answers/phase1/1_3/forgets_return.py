"""Scatters the batch, and keeps the rows to itself.

rejected by: test_every_rank_gets_its_rows
phrase: scatter_batch returned None: is there a return?
"""

from typing import Any

from solutions.phase1_data_parallel.data_loader import scatter_batch as _scatter_batch


def scatter_batch(*args: Any, **options: Any) -> None:
    _scatter_batch(*args, **options)
