"""A cache for operations on meta tensors: a repeated call does not compute its shapes again.

Meta tensors hold no values, so a result is only a shape. But torch computes the shape in Python, in
100 to 400 us per call, and the ranks of a simulated run repeat the same calls. A repeated call
takes 15 us here.

    x, y = torch.empty(2, 4096, 4096, device="meta")
    x + y                                     # runs torch's kernel, and stores the result's shape
    y + x                                     # makes a new tensor of the stored shape
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from distlab.sim.device.flops import Cost, Operation, op_cost, tensors_in

Key = tuple[Any, ...]  # everything that the shape of a result may depend on

_MOST_CALLS = 20_000  # maximum number of calls in the cache
_PLAIN = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.device})
_PLAIN |= {torch.layout, torch.memory_format}
_SEQUENCES, _STRIDED = (list, tuple), torch.strided  # reading a global is faster than torch.strided


class Result(NamedTuple):
    """One result of a call: the argument at ``position``, a new tensor of ``dtype``, or None."""

    position: int | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


class Call(NamedTuple):
    """Results and cost of a call. ``kind`` is list or tuple, or None for a single result."""

    results: list[Result]
    kind: type | None
    cost: Cost


_calls: dict[Key, Call] = {}


def run(
    func: OpOverload[..., Any], op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Cost | None]:
    """Run an operation, or build its result from the cache.

    Returns: Result of the operation, and its cost (None if the call was not in the cache).
    """
    key = _key(func, op, args, kwargs) if op.is_repeatable else None
    if key is None:
        return func(*args, **kwargs), None
    if call := _calls.get(key):
        return _repeat(call, args), call.cost
    out = func(*args, **kwargs)
    _remember(key, op, args, kwargs, out)
    return out, None


def _key(
    func: OpOverload[..., Any], op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Key | None:
    """Return the key of this call in the cache, or None if it cannot be cached."""
    parts: list[Any] = [func, *kwargs]
    tensors: list[int] = []
    # A float never affects the shape of an in-place result, but optimizers change it at every step,
    # so it is left out of the key.
    skipped = float if op.written else None
    if not (
        _describe(args, skipped, parts, tensors)
        and _describe([*kwargs.values()], skipped, parts, tensors)
        and tensors
    ):
        return None
    if len(set(tensors)) < len(tensors):  # the same tensor passed twice costs less than two tensors
        first_places: dict[int, int] = {}
        parts += [first_places.setdefault(tensor, place) for place, tensor in enumerate(tensors)]
    return tuple(parts)


def _describe(
    values: Sequence[Any], skipped: type | None, parts: list[Any], tensors: list[int]
) -> bool:
    """Append to ``parts`` all that shapes depend on; return False if the call cannot be cached."""
    parts.append(len(values))
    for value in values:
        kind = type(value)
        if isinstance(value, Tensor):
            if not value.is_meta or value.layout is not _STRIDED:
                return False
            parts += (value.dtype, value.shape, value.stride())
            tensors.append(id(value))
        elif kind in _PLAIN:
            parts += (kind, None if kind is skipped else value)
        elif kind not in _SEQUENCES or not _describe(value, skipped, parts, tensors):
            return False
    return True


def _remember(
    key: Key, op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> None:
    kind = type(out) if isinstance(out, _SEQUENCES) else None
    used = {id(tensor.untyped_storage()) for tensor in tensors_in(args)}
    results = []
    for value in (out,) if kind is None else out:
        result = _result(op, args, value, used)
        if result is None:
            return
        results.append(result)
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    _calls[key] = Call(results, kind, op_cost(op, args, kwargs, out))


def _result(op: Operation, args: Sequence[Any], value: Any, used: set[int]) -> Result | None:
    """Return the recipe for a result, or None if its memory is shared or larger than needed."""
    if value is None:
        return Result()
    for position in op.written:
        if value is args[position]:
            return Result(position)
    if type(value) is not Tensor or id(storage := value.untyped_storage()) in used:
        return None
    used.add(id(storage))
    result = Result(None, value.shape, value.stride(), value.dtype)
    is_alone = _make(result, args).untyped_storage().nbytes() == storage.nbytes()
    return result if is_alone else None


def _repeat(call: Call, args: Sequence[Any]) -> Any:
    if call.kind is None:
        return _make(call.results[0], args)
    return call.kind([_make(result, args) for result in call.results])


def _make(result: Result, args: Sequence[Any]) -> Any:
    position, shape, stride, dtype = result
    if position is not None:
        return args[position]
    return dtype and torch.empty_strided(shape, stride, dtype=dtype, device="meta")
