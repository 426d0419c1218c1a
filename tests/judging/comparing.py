"""A check of equal values with a common sentence, and a note of the tensors a call has changed."""

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
        here: Case and rank, at the beginning of the message.
        what: Subject of the sentence.
        expected: Right value.
        got: Learner's value.
        cause: Likely cause, in sentences that follow.
        tolerance: Greatest difference between numbers at the same place.
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
