"""States of all kinds, converted to plain values that can be compared and shown."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only


def plain(part: Any) -> Any:
    """Return a state with tensors replaced by lists, and with sorted keys in its mappings."""
    if isinstance(part, Tensor):
        return [f"{part.dtype} on {part.device.type}", [*part.shape], part.detach().tolist()]
    if isinstance(part, Mapping):
        return {key: plain(part[key]) for key in sorted(part, key=str)}
    if isinstance(part, list | tuple):
        return [type(part).__name__, *map(plain, part)]
    return part


def on_cpu(state: Any) -> Any:
    """Return a copy of a state with its tensors on the CPU."""
    return tree_map_only(Tensor, lambda x: x.detach().cpu(), state)


def same(a: Any, b: Any) -> bool:
    """Return whether two states have equal types, keys, dtypes, devices and bits."""
    return repr(plain(a)) == repr(plain(b))
