"""CUDA's allocator as a rank sees it: a simulated GPU has no cache, segments or pools."""

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import count
from typing import Any

from distlab.sim.gpu.device import rank_device

_numbers = count(1)


class MemPool:
    """``torch.cuda.MemPool``: what is allocated in it counts as any other memory."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.id = (0, next(_numbers))

    def use_count(self) -> int:
        return 1

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        return []


def _segments(*_: Any, **__: Any) -> list[dict[str, Any]]:
    """Return one segment, which holds all tensors of the rank."""
    device = rank_device()
    live = device.memory.live_bytes
    sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), live)
    block = {"address": 0, "size": live, "requested_size": live, "state": "active_allocated"}
    segment = {"device": device.index, "address": 0, "stream": 0, "segment_type": "large"}
    return [{**segment, **sizes, "blocks": [{**block, "frames": []}]}] if live else []


def _record_history(enabled: Any = "all", *_: Any, **__: Any) -> None:
    if enabled:
        warnings.warn(
            "simulated GPUs keep no history of allocations, so snapshots show the live bytes only; "
            "what the peak of each rank consists of is below the run's table",
            stacklevel=3,
        )


def _snapshot(*_: Any, **__: Any) -> dict[str, Any]:
    return {"segments": _segments(), "device_traces": [[]], "allocator_settings": {}}


SURFACE: Mapping[str, Any] = {
    "MemPool": MemPool,
    "use_mem_pool": lambda pool, device=None: nullcontext(),
    "memory_snapshot": _segments,
    "get_allocator_backend": lambda: "native",
    "_record_memory_history": _record_history,
    "_snapshot": _snapshot,
}
