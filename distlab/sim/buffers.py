"""Comparing and filling tensors as memory, whatever shape, strides and gradients they have."""

import torch
from torch import Tensor


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """Compare bit by bit, so that a NaN that has not changed is equal to itself."""
    return torch.equal(_bytes(x), _bytes(y))


def _bytes(x: Tensor) -> Tensor:
    flat = x.detach().contiguous().view(-1)  # without dims there is none to view as bytes
    if flat.numel() == 1:  # its stride may be any
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def copy(output: Tensor, value: Tensor) -> None:
    if output.requires_grad or value.requires_grad:  # autograd must not see it
        output, value = output.detach(), value.detach()
    output.copy_(value if value.shape == output.shape else value.view(output.shape))
