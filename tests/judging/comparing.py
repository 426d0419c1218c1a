"""Detection of the tensors that a call has changed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def noting_changes(**tensors: Tensor) -> Iterator[list[str]]:
    """Yield a list; on exit, add the names of tensors whose values or requires_grad changed."""
    changed: list[str] = []
    before = {name: (x.detach().clone(), x.requires_grad) for name, x in tensors.items()}
    yield changed
    for name, (values, requires_grad) in before.items():
        x = tensors[name]
        if x.requires_grad != requires_grad or not torch.equal(x.detach(), values):
            changed.append(name)
