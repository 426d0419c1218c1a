"""Cost of a tensor operation: FLOPs, and bytes read and written.

A multiplication and an addition are two FLOPs, as in the published formulas. Only products count:
matrix products, convolutions and fused attention. Element-wise operations are memory-bound on any
accelerator, so they have bytes but no FLOPs.

    (64, 512) @ (512, 256) in bfloat16
        FLOPs   2 * 64 * 256 * 512                  = 16,777,216
        bytes   2 * (64 * 512 + 512 * 256 + 64 * 256) = 360,448

These costs are deliberate approximations:
- The backward pass of attention counts the four products that the gradient needs, but not the one
  that a fused kernel recomputes. A causal mask halves the cost, whatever the shape.
- A scatter reads and writes its whole target. Two views of the same elements count as two tensors.
- Linear algebra beyond products (``torch.linalg``, ``cdist``) has bytes only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

Formula = Callable[[Sequence[Any], Any], int]  # (arguments of the operation, its result) -> FLOPs

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_SEQUENCES, _STRIDED = (list, tuple), torch.strided  # reading a global is faster than torch.strided
COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that only change metadata or allocate. Views are not listed: their schema marks them.
_UNTOUCHED = _names(
    "_unsafe_view _local_scalar_dense resize_ set_ t_ transpose_ squeeze_ unsqueeze_ as_strided_ "
    "detach_ empty empty_like empty_strided new_empty new_empty_strided"
)
# Operations that write their first argument without reading it.
_OVERWRITES = _names(
    "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ "
    "_foreach_copy_ _foreach_zero_"
)
# Operations that read from their first argument only the elements that they return.
_GATHERS = _names("embedding index index_select gather take")
# Operations whose result is shaped like an argument, but not computed from it.
_FACTORIES = _names(
    "empty_like zeros_like ones_like full_like rand_like randn_like "
    "new_empty new_empty_strided new_zeros new_ones new_full"
)


@dataclass(frozen=True, slots=True)
class Operation:
    """Properties of an operation that follow from its schema, and so are the same for all calls.

    Attributes:
        is_composite: True if it consists of other operations. Such an operation arrives undivided
            only in inference mode.
        is_view: True if its result is a view of its first argument.
        is_free: True if the device moves no data, as for views, metadata and communication.
        is_repeatable: True if it only computes results whose shapes its arguments determine.
        creates: True if it may return a tensor with new memory.
        may_alias: True if it may return a view although its schema does not say so.
        adopts: True if its result holds memory that no operation allocated, as in
            ``torch.tensor([1.0])``.
        resizes: True if it may change the size of the tensor that it writes.
        written: Positions of the arguments that it writes.
        out_names: Names of the keyword arguments that only receive results.
    """

    name: str
    flops: Formula | None
    is_composite: bool
    is_view: bool
    is_free: bool
    is_factory: bool
    is_repeatable: bool
    creates: bool
    may_alias: bool
    adopts: bool
    resizes: bool
    overwrites: bool
    gathers: bool
    written: tuple[int, ...]
    out_names: frozenset[str]


class Cost(NamedTuple):
    """The cost of one call. ``dtype`` is that of its first tensor; the FLOP/s depend on it."""

    flops: int
    bytes: int
    dtype: torch.dtype | None


def op_cost(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Cost:
    """Return the cost of a call, from its arguments and its result.

    A tensor that is read and written counts twice: ``a.add_(b)`` moves as many bytes as ``a + b``.
    A broadcast tensor (stride 0) counts only the elements that it has in memory.

    Args:
        args, kwargs: Arguments as a ``TorchDispatchMode`` receives them.
        out: Result of the operation.
    """
    if op.is_free:
        return Cost(0, 0, None)
    read = tensors_in(args[1:] if op.overwrites else args)
    if kwargs:
        read += tensors_in([kwargs[name] for name in kwargs if name not in op.out_names])
    written = tensors_in(out)
    if op.written:
        written += tensors_in([args[index] for index in op.written])
    written_bytes = _total_bytes(written)
    moved = _total_bytes(read) + written_bytes
    if op.gathers:
        moved -= max(0, _touched_bytes(args[0]) - written_bytes)
    flops = op.flops(args, out) if op.flops else 0
    return Cost(flops, moved, read[0].dtype if read else None)


@cache
def describe(func: OpOverload[..., Any]) -> Operation:
    """Return the properties of an operation."""
    name, schema = func._opname, func._schema
    writes = [
        (position, argument)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    out_names = frozenset(argument.name for _, argument in writes if argument.kwarg_only)
    adopts = name == "lift_fresh" or "set_.source_Storage_" in str(func)
    returns_new = any(result.alias_info is None for result in schema.returns)
    is_free = func.is_view or name in _UNTOUCHED or func.namespace in COMMUNICATION
    resizes = bool(out_names) or name.startswith("resize")
    return Operation(
        name=name,
        flops=_formula(func),
        is_composite=_is_composite(func.name()),  # type: ignore[no-untyped-call]
        is_view=func.is_view and func.namespace == "aten",
        is_free=is_free,
        is_factory=name in _FACTORIES,
        is_repeatable=func.namespace == "aten" and not (is_free or adopts or resizes),
        creates=(returns_new and name != "_unsafe_view") or adopts,
        may_alias=func.namespace != "aten",
        adopts=adopts,
        resizes=resizes,
        overwrites=name in _OVERWRITES,
        gathers=name in _GATHERS,
        written=tuple(position for position, argument in writes if not argument.kwarg_only),
        out_names=out_names,
    )


def _is_composite(name: str) -> bool:
    """Return whether an operation consists of others; those of TorchScript are unknown there.

    An operation that also has a kernel of its own, such as ``silu_backward``, runs that.
    """
    with suppress(RuntimeError):
        return _has_kernel(name, "CompositeImplicitAutograd") and not _has_kernel(name, "CPU")
    return False


def tensors_in(values: Any) -> list[Tensor]:
    """Return all tensors in arguments or results, including those in lists, except sparse ones.

    A sparse tensor owns no memory: its indices and values are separate tensors.
    """
    if isinstance(values, Tensor):
        values = (values,)
    elif not isinstance(values, _SEQUENCES):
        return []
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is _STRIDED:
                tensors.append(value)
        elif isinstance(value, _SEQUENCES):
            tensors += tensors_in(value)
    return tensors


def _total_bytes(tensors: list[Tensor]) -> int:
    if len(tensors) == 1:
        return _touched_bytes(tensors[0])
    return sum([_touched_bytes(tensor) for tensor in {id(t): t for t in tensors}.values()])


def _touched_bytes(tensor: Tensor) -> int:
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.nbytes
    sizes = [size for size, stride in zip(tensor.shape, strides, strict=True) if stride]
    return math.prod(sizes) * tensor.itemsize if tensor.numel() else 0


# FLOPs. torch.utils.flop_counter is right for matrix products, but slow (it maps over trees of
# arguments), and it counts the weight gradient of a grouped convolution once per group.


def _formula(func: OpOverload[..., Any]) -> Formula | None:
    formula = _FORMULAS.get(func._opname.removesuffix("_")) if func.namespace == "aten" else None
    of_torch = flop_registry.get(func.overloadpacket)
    if formula or of_torch is None:
        return formula
    return lambda args, out: int(of_torch(*args, out_val=out))


def _matrix_product(first: int) -> Formula:
    """Return the formula for products that sum over the last dimension of argument ``first``."""
    return lambda args, out: int(2 * out.numel() * args[first].shape[-1])


def _convolution(args: Sequence[Any], out: Any) -> int:
    x, weight, transposed = args[0], args[1], args[6]
    return _convolution_flops(x, weight, x if transposed else out)


def _convolution_backward(args: Sequence[Any], out: Any) -> int:
    """Count the forward pass's products once for each gradient wanted (input, weight)."""
    grad_out, x, weight, transposed, output_mask = *args[:3], args[7], args[10]
    forward = _convolution_flops(x, weight, x if transposed else grad_out)
    return forward * sum(map(bool, output_mask[:2]))


def _convolution_flops(x: Tensor, weight: Tensor, where: Tensor) -> int:
    """Count one product per sample, weight and position of ``where``; padding counts too."""
    return 2 * x.shape[0] * math.prod(where.shape[2:]) * weight.numel()


def _recurrent_layer(args: Sequence[Any], out: Any) -> int:
    """Count the products of each input row, and of each hidden state, with their weights."""
    x, of_input, of_state = args[:3]
    products = x.numel() // x.shape[-1] * (of_input.numel() + of_state.numel())
    return 2 * int(products)


def _attention(args: Sequence[Any], out: Any) -> int:
    is_causal = len(args) > 4 and args[4]  # torch omits trailing arguments left at their default
    return _attention_flops(args[0], args[1], args[2], is_causal)


def _attention_backward(args: Sequence[Any], out: Any) -> int:
    return 2 * _attention_flops(args[1], args[2], args[3], args[7])


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> int:
    """Count two products per head: queries with keys (scores), then scores with values."""
    *batch_and_heads, length, width = query.shape
    pairs = math.prod(batch_and_heads) * length * key.shape[-2]
    flops = 2 * pairs * (width + value.shape[-1])
    return flops // 2 if is_causal else flops


_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot"), _matrix_product(first=0)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "_addmm_activation"), _matrix_product(first=1)),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "mkldnn_rnn_layer": _recurrent_layer,  # nn.LSTM on CPU
    "mkldnn_rnn_layer_backward": lambda args, out: 2 * _recurrent_layer(args, out),
    # F.scaled_dot_product_attention on CPU; torch's counter does not cover it (pytorch#195460).
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
