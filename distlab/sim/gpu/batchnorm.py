"""The parts of ``SyncBatchNorm``, which torch has only for GPUs, for tensors that are on the CPU.

    batch_norm_stats                       mean and 1/σ of a rank's batch, for each channel
    batch_norm_gather_stats_with_counts    those of all ranks' batches, which update running values
    batch_norm_elemt                       (x - mean)/σ · weight + bias
    batch_norm_backward_reduce             Σ dy, Σ dy (x - mean), and gradients of weight and bias
    batch_norm_backward_elemt              gradient of x, from these sums of all ranks

As in torch's CUDA code, inputs of 16 bits have statistics in float32, and results are in the dtype
of the input.

Source: torch, aten/src/ATen/native/cuda/Normalization.cuh.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.library import Library


def _over(x: Tensor) -> list[int]:
    """Return the dims that a channel's values extend over."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _fit(per_channel: Tensor, x: Tensor) -> Tensor:
    """View one value per channel so that it broadcasts against ``x``."""
    return per_channel.view(1, -1, *[1] * (x.dim() - 2))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the mean and the inverse standard deviation of each channel."""
    variance, mean = torch.var_mean(_wide(x), _over(x), correction=0)
    return mean, (variance + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the statistics of all ranks' batches together, and update the running values.

    Args:
        means, invstds: Those of each rank, [ranks, channels].
        counts: Number of values per channel of each rank, [ranks].
    """
    of_rank, total = counts.to(means.dtype)[:, None], counts.sum().to(means.dtype)
    mean = (means * of_rank).sum(0) / total
    squares = (((invstds**-2 - eps) + (means - mean) ** 2) * of_rank).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((squares / (total - 1)).to(running_var.dtype), momentum)
    return mean, (squares / total + eps).rsqrt()


def batch_norm_elemt(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    """Return the normalized input."""
    y = (_wide(x) - _fit(mean, x)) * _fit(invstd, x)
    if weight is not None:
        y = y * _fit(weight, x)
    if bias is not None:
        y = y + _fit(bias, x)
    return y.to(x.dtype)


def batch_norm_backward_reduce(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    *_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a rank's sums over dy and dy (x - mean), and its gradients of weight and bias."""
    wide = _wide(dy)
    sum_dy = wide.sum(_over(x))
    sum_dy_xmu = (wide * (_wide(x) - _fit(mean, x))).sum(_over(x))
    dtype = mean.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype, copy=True)


def batch_norm_backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    """Return the gradient of the input, from the sums of all ranks."""
    total = counts.sum()
    slope = _fit(invstd**2 * sum_dy_xmu / total, x)
    dx = _wide(dy) - _fit(sum_dy / total, x) - (_wide(x) - _fit(mean, x)) * slope
    scale = invstd if weight is None else invstd * weight
    return (dx * _fit(scale, x)).to(dy.dtype)


_KERNELS = (
    *(batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt),
    *(batch_norm_backward_reduce, batch_norm_backward_elemt),
)


def install(undo: ExitStack) -> None:
    """Give torch these operations until ``undo`` is closed."""
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    undo.callback(library._destroy)
    for kernel in _KERNELS:
        library.impl(kernel.__name__, kernel, "CPU")
