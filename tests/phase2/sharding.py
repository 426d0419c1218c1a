"""Helpers of the bodies and judges of tensor parallelism: drawn numbers, parts of a rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def drawn(*shape: int, seed: int) -> Tensor:
    """Numbers from -1 to 1 in float64, the same wherever they are drawn."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1


def laid_out(x: Tensor, is_transposed: bool) -> Tensor:
    """Return the same numbers, in memory that is not contiguous if ``is_transposed``."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if is_transposed else x


def rank_part(full: Tensor, rank: int, n: int, dim: int | None) -> Tensor:
    """The rank's part of a dim; None: all of it."""
    return full if dim is None else full.chunk(n, dim)[rank]


def place(group: Any) -> tuple[int, int]:
    """Rank and number of ranks."""
    return dist.get_rank(group), dist.get_world_size(group)


def listed(tensor: Any) -> Any:
    """A tensor as lists; anything else as it is."""
    return tensor.detach().tolist() if isinstance(tensor, Tensor) else tensor


def state_of(module: nn.Module) -> dict[str, Any]:
    """Values, gradients, dtypes and memory of the parameters, by name."""
    return {name: _description_of(p) for name, p in module.named_parameters()}


def _description_of(parameter: nn.Parameter) -> dict[str, Any]:
    return {
        "values": listed(parameter),
        "gradient": listed(parameter.grad),
        "is_trained": parameter.requires_grad,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "num_bytes": parameter.nbytes,
        "held_bytes": parameter.untyped_storage().nbytes(),
    }


class _End(torch.autograd.Function):
    """The end of a graph; its backward pass hands on a gradient, the very tensor."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def go_backward_with(y: Tensor, gradient: Tensor) -> None:
    """Do what ``y.backward(gradient)`` does, which would load SymPy.

    An output without a graph, or of another shape, is left for the judge, who knows what is wrong.
    """
    if y.requires_grad and y.shape == gradient.shape:
        _End.apply(y, gradient).backward()  # type: ignore[no-untyped-call]


def is_alone_summed(x: Tensor) -> bool:
    """True if the gradient of another reader of ``x`` arrives as it is; x.grad stays as it was."""
    before, x.grad = x.grad, None
    gradient = x.detach().clone()
    go_backward_with(x, gradient)
    found, x.grad = x.grad, before
    return torch.equal(found, gradient) if found is not None else False
