"""Composite operations whose C++ code makes further tensors beside those of a GPU.

    scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        its mask is ones() with the options of q, and so, for C++ code, on the CPU

They run with the GPU's number at hand, so that what they make is put there. The list has those
operations of torch's own samples (``op_db``) that mixed devices otherwise.

``flex_attention`` is one operator of a higher order, made for torch's compiler. It runs as the
operations of which its reference consists, so autograd goes through them, too.
"""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention
from torch.library import Library
from torch.nn.attention import flex_attention

from distlab.sim.gpu.autocast import cast
from distlab.sim.gpu.device import this_device
from distlab.util.replacing import replace_until

_NAMES = """
    scaled_dot_product_attention one_hot pad_sequence combinations vander linalg_vander
    quantile quantile.scalar nanquantile nanquantile.scalar
    linalg_matrix_rank linalg_matrix_rank.tol_tensor linalg_matrix_rank.atol_rtol_float
    linalg_matrix_rank.atol_rtol_tensor
"""


def _beside(op: Any) -> Callable[..., Any]:
    """Return a composite operation that makes its tensors on the GPU of its arguments."""

    def run(*args: Any, **kwargs: Any) -> Any:
        device = this_device()
        with device.beside(args, kwargs) if device else nullcontext():
            return op.decompose(*args, **kwargs)

    return run


def _attend(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``flex_attention``; under autocast in its dtype, with scores in float32."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        args = (*cast(args[:3], dtype), *args[3:])
    with torch.autocast("cuda", enabled=False):
        return math_attention(*args)


def install(undo: ExitStack) -> None:
    """Put what composite operations make on GPUs, until ``undo`` is closed."""
    replace_until(undo, flex_attention, "flex_attention_hop", _attend)
    # Otherwise torch would compile it, or warn that the program does not.
    replace_until(undo, flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    undo.callback(library._destroy)
    for name in _NAMES.split():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, _beside(op), "AutogradCPU")  # inference mode asks the device itself
