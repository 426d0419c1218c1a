"""One sentence for all that should be equal, and a note of what a call has changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from judging.expect import expect


def check_equal(
    here: str, what: str, expected: Any, got: Any, cause: str = "", tolerance: float = 0.0
) -> None:
    """Check that numbers, nested or not, are equal but for a tolerance, and all else is equal.

    Args:
        here: The case and the rank, which the message begins with.
        what: The subject of the sentence.
        expected: The right value.
        got: The learner's value.
        cause: The likely one, in sentences that follow.
        tolerance: The greatest difference of numbers at the same place.
    """
    expect(f"{here}: {what}", got, expected, cause, tolerance)


@contextmanager
def noting_changes(**tensors: Tensor) -> Iterator[list[str]]:
    """Yield a list that names afterwards the tensors whose numbers or flags have changed."""
    changed: list[str] = []
    before = {name: (x.detach().clone(), x.requires_grad) for name, x in tensors.items()}
    yield changed
    for name, (values, requires_grad) in before.items():
        x = tensors[name]
        if x.requires_grad != requires_grad or not torch.equal(x.detach(), values):
            changed.append(name)
