"""Cost of a tensor operation: arithmetic done, and bytes read and written.

A multiplication and an addition are two FLOPs, as in the published formulas. Only products count:
matrix products, convolutions and fused attention; whatever works element by element is limited by
memory on any accelerator, so it has bytes but no FLOPs.

    (64, 512) @ (512, 256) in bfloat16
        FLOPs   2 * 64 * 256 * 512                  = 16,777,216
        bytes   2 * (64 * 512 + 512 * 256 + 64 * 256) = 360,448

Not exact, on purpose: attention counts the products that its gradient needs, not those that a fused
kernel repeats (it repeats one of five); a causal mask halves attention, whatever the shape; a
scatter reads and writes its whole target; two views of the same elements count as two tensors;
linear algebra beyond products (``torch.linalg``, ``cdist``) has bytes only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

Formula = Callable[[Sequence[Any], Any], int]  # arguments: those of the operation, and its result

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_SEQUENCES, _STRIDED = (list, tuple), torch.strided  # looked up for every operation
COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Change what a tensor is, not what it holds; views that say so in their schema are not listed.
_UNTOUCHED = _names(
    "_unsafe_view _local_scalar_dense resize_ set_ t_ transpose_ squeeze_ unsqueeze_ as_strided_ "
    "detach_ empty empty_like empty_strided new_empty new_empty_strided"
)
# Write their first argument without reading it.
_OVERWRITES = _names(
    "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ "
    "_foreach_copy_ _foreach_zero_"
)
# Read from their first argument only what they return.
_GATHERS = _names("embedding index index_select gather take")
# Shaped like an argument, but not computed from it.
_FACTORIES = _names(
    "empty_like zeros_like ones_like full_like rand_like randn_like "
    "new_empty new_empty_strided new_zeros new_ones new_full"
)


@dataclass(frozen=True, slots=True)
class Operation:
    """Properties of an operation by its schema, the same for every call."""

    name: str
    flops: Formula | None
    is_composite: bool  # made of others; comes whole only where autograd is off for good
    is_view: bool  # its result is a view of its first argument
    is_free: bool  # a view, metadata, an allocation or communication: no data moved by the device
    is_factory: bool
    is_repeatable: bool  # the shapes of its results follow from its arguments; it only computes
    creates: bool  # may return a tensor with memory of its own
    may_alias: bool  # its schema may be silent about returning a view
    adopts: bool  # its result holds memory that no operation allocated, as in torch.tensor([1.0])
    resizes: bool  # may give the tensor it writes another size
    overwrites: bool
    gathers: bool
    written: tuple[int, ...]  # positions of the arguments it writes
    out_names: frozenset[str]  # keyword arguments that are pure results


class Cost(NamedTuple):
    """The work of one call. ``dtype`` is that of its first tensor: it selects the arithmetic."""

    flops: int
    bytes: int
    dtype: torch.dtype | None


def op_cost(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Cost:
    """Return what a call cost, from its arguments and its result.

    A tensor that is read and written counts twice: ``a.add_(b)`` moves as much as ``a + b``.
    Of a broadcast tensor (stride 0) only the elements that exist count.

    Args: args, kwargs: as a ``TorchDispatchMode`` gets them. out: what the operation returned.
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
    """Return what is known of an operation before it is called."""
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
        is_composite=_has_kernel(func.name(), "CompositeImplicitAutograd"),  # type: ignore[no-untyped-call]
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


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors among arguments or results; lists are looked into, sparse ones left out.

    A sparse tensor owns nothing: its indices and values are tensors of their own.
    """
    if isinstance(values, Tensor):
        values = (values,)
    elif not isinstance(values, _SEQUENCES):
        return []
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is _STRIDED:
                found.append(value)
        elif isinstance(value, _SEQUENCES):
            found += tensors_in(value)
    return found


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


# FLOPs. torch.utils.flop_counter is right for matrix products, but slow (it maps over a tree of
# arguments), and it counts a grouped convolution's weight gradient once per group.


def _formula(func: OpOverload[..., Any]) -> Formula | None:
    own = _FORMULAS.get(func._opname.removesuffix("_")) if func.namespace == "aten" else None
    library = flop_registry.get(func.overloadpacket)
    if own or library is None:
        return own
    return lambda args, out: int(library(*args, out_val=out))


def _matrix_product(left: int) -> Formula:
    """Each element of the result is a sum over the last dim of argument ``left``."""
    return lambda args, out: int(2 * out.numel() * args[left].shape[-1])


def _convolution(args: Sequence[Any], out: Any) -> int:
    x, weight, transposed = args[0], args[1], args[6]
    return _convolution_flops(x, weight, x if transposed else out)


def _convolution_backward(args: Sequence[Any], out: Any) -> int:
    """Each of the two gradients, of input and of weight, uses every product once more."""
    grad_out, x, weight, transposed, output_mask = *args[:3], args[7], args[10]
    forward = _convolution_flops(x, weight, x if transposed else grad_out)
    return forward * sum(map(bool, output_mask[:2]))


def _convolution_flops(x: Tensor, weight: Tensor, where: Tensor) -> int:
    """Every weight meets every position of ``where``, once per sample (padding included)."""
    return 2 * x.shape[0] * math.prod(where.shape[2:]) * weight.numel()


def _recurrent_layer(args: Sequence[Any], out: Any) -> int:
    """Each row of the input meets the weights of the input and, as a state, those of the state."""
    x, of_input, of_state = args[:3]
    products = x.numel() // x.shape[-1] * (of_input.numel() + of_state.numel())
    return 2 * int(products)


def _attention(args: Sequence[Any], out: Any) -> int:
    is_causal = len(args) > 4 and args[4]  # defaults at the end of the arguments are left out
    return _attention_flops(args[0], args[1], args[2], is_causal)


def _attention_backward(args: Sequence[Any], out: Any) -> int:
    return 2 * _attention_flops(args[1], args[2], args[3], args[7])


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> int:
    """Scores from (query, key), then a mean of values by score: two products for each head."""
    *batch_and_heads, length, width = query.shape
    pairs = math.prod(batch_and_heads) * length * key.shape[-2]
    flops = 2 * pairs * (width + value.shape[-1])
    return flops // 2 if is_causal else flops


_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot"), _matrix_product(left=0)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "_addmm_activation"), _matrix_product(left=1)),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "mkldnn_rnn_layer": _recurrent_layer,  # nn.LSTM on CPU
    "mkldnn_rnn_layer_backward": lambda args, out: 2 * _recurrent_layer(args, out),
    # What F.scaled_dot_product_attention becomes on CPU; unknown to torch (pytorch#195460).
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
