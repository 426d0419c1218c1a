"""Reading, filling and comparing tensors as memory, whatever shape and gradients they have."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

Quiet = Callable[[], contextlib.AbstractContextManager[object]]
_NOTHING = contextlib.nullcontext()


class Buffers:
    """What the simulator itself does with the tensors of ranks, for free.

    Args:
        is_strict: whether the buffers of operations under way are watched.
        unnoticed: keeps what happens inside out of the running rank's account; None: there is none.

    Attributes:
        unnoticed: the same, for what others do with tensors.
        copy: writes its second argument to its first.
    """

    def __init__(self, *, is_strict: bool, unnoticed: Quiet | None) -> None:
        self.is_strict = is_strict
        self.unnoticed: Quiet = unnoticed or (lambda: _NOTHING)
        self.copy = _copy if unnoticed is None else self._copy_unnoticed

    def copied(self, tensor: Tensor) -> Tensor:
        """Copy a tensor as it is now."""
        with self.unnoticed():
            return tensor.detach().clone()

    def _copy_unnoticed(self, output: Tensor, value: Tensor) -> None:
        with self.unnoticed():
            _copy(output, value)


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """Compare bit by bit, so that a NaN that has not changed is equal to itself."""
    return torch.equal(_bytes(x), _bytes(y))


def _bytes(x: Tensor) -> Tensor:
    flat = x.detach().contiguous().view(-1)  # without dims there is none to view as bytes
    if flat.numel() == 1:  # its stride may be any
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _copy(output: Tensor, value: Tensor) -> None:
    if output.requires_grad or value.requires_grad:  # autograd must not see it
        output, value = output.detach(), value.detach()
    output.copy_(value if value.shape == output.shape else value.view(output.shape))
