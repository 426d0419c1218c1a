"""Operations for which the host waits, because it has to know a value or a size.

The list follows torch's CUDA code: ``_local_scalar_dense`` copies a value to the host, ``nonzero``
first counts its results, and a copy from pageable memory goes through a buffer of the driver.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.sim.gpu.placement import home_of, index_of

_ALWAYS = {
    "_local_scalar_dense": ".item()",
    "equal": "torch.equal()",
    "nonzero": "nonzero()",
    "masked_select": "masked_select()",
    "_unique2": "unique()",
    "unique_dim": "unique()",
    "unique_consecutive": "unique_consecutive()",
    "bincount": "bincount()",
    "_linalg_check_errors": "a check of linear algebra",
}
_BY_INDEX = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
_MASKS = (torch.bool, torch.uint8)
TO_HOST, TO_GPU = "a copy to the host", "a copy to the GPU"
TO_PAGEABLE, FROM_PAGEABLE = f"{TO_HOST}'s pageable memory", f"{TO_GPU} from pageable memory"
COPIES = frozenset({"copy_", "_to_copy"})


class Copy(NamedTuple):
    """A copy between the host and a GPU, or between two GPUs.

    Attributes:
        waits: Reason why the host waits for it; "" if it does not.
    """

    source: Tensor
    target: Tensor
    waits: str

    @property
    def gpu(self) -> int:
        """Number of the GPU that copies."""
        source = index_of(self.source)
        return source if source >= 0 else index_of(self.target)


def copy_of(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, target: int
) -> Copy | None:
    """Return the copy that an operation makes; None if its tensors are in one place.

    Args:
        target: Number of the GPU that holds the result; -1 for the host.
    """
    source = args[1] if name == "copy_" else args[0]
    index = index_of(source)
    if index == target:
        return None
    non_blocking = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
    waits = ""
    if target < 0:
        is_pinned = name == "_to_copy" or _is_pinned(out)  # Tensor.to makes pinned memory
        waits = TO_HOST if not non_blocking else "" if is_pinned else TO_PAGEABLE
    elif index < 0:
        waits = FROM_PAGEABLE if not _is_pinned(source) else "" if non_blocking else TO_GPU
    return Copy(source, out, waits)


def _is_pinned(tensor: Tensor) -> bool:
    home = home_of(tensor)
    return home is not None and home.is_pinned


def reason(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return why the host waits for an operation on a GPU; "" if it does not."""
    if name in _ALWAYS:
        return _ALWAYS[name]
    if name in _BY_INDEX:
        return _of_index(name, args)
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return "repeat_interleave() without output_size"
    return ""


def _of_index(name: str, args: Sequence[Any]) -> str:
    tensors = [index for index in args[1] if isinstance(index, Tensor)]
    if any(index.dtype in _MASKS for index in tensors) and not _is_masked_fill(name, args):
        return "an index that is a mask"
    if any(index_of(index) < 0 for index in tensors):
        return "an index on the host"
    return ""


def _is_masked_fill(name: str, args: Sequence[Any]) -> bool:
    """Return whether ``x[mask] = value`` sets a single value, which torch does by masked_fill_."""
    accumulates = len(args) > 3 and args[3]
    return name != "index" and len(args[1]) == 1 and args[2].numel() == 1 and not accumulates
