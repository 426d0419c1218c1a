"""Forgets evaluation mode: dropout drops.

rejected by: test_modes_are_restored
phrase: in training mode
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    yield
