"""Switches everything to training afterwards, what was frozen too.

rejected by: test_modes_are_restored
phrase: frozen in evaluation mode
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    model.eval()
    yield
    model.train()
