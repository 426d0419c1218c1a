"""Compare checkpoints bit by bit."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path


def differences(a: Any, b: Any) -> list[str]:
    """Return the sorted paths at which two states differ or only one of them has a value."""
    first, second = _leaves(a), _leaves(b)
    missing = object()
    return sorted(
        path
        for path in {*first, *second}
        if not _equal(first.get(path, missing), second.get(path, missing))
    )


def counted(state: Any) -> str:
    """Describe a state's values, as in ``62 tensors with 432,086 numbers, 40 other values``."""
    leaves = [*_leaves(state).values()]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    numbers = sum(tensor.numel() for tensor in tensors)
    others = len(leaves) - len(tensors)
    return f"{len(tensors):,} tensors with {numbers:,} numbers, {others:,} other values"


def _leaves(state: Any) -> dict[str, Any]:
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(state)[0]}


def _equal(a: Any, b: Any) -> bool:
    """Return True if two values have the same bits, including those of NaN and of signed zeros."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        is_like = a.dtype == b.dtype and a.shape == b.shape
        return is_like and torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.tobytes() == b.tobytes()
    return type(a) is type(b) and bool(a == b)


def digest(state: Any) -> str:
    """Return a hash of a state's paths and values; a change of any bit changes the hash."""
    total = hashlib.sha256()
    for path, leaf in _leaves(state).items():
        total.update(path.encode())
        if isinstance(leaf, torch.Tensor):
            total.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            total.update(leaf.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(repr(leaf).encode())
    return total.hexdigest()
