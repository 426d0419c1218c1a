"""Data loaders with ``pin_memory=True`` and worker processes.

In torch, a thread pins what the workers send. It would wait for them in real time, and no other
thread of the world could run meanwhile. So the thread that takes a batch pins it.
"""

from collections.abc import Callable
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data._utils import pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from distlab.sim.gpu.device import this_device
from distlab.util.replacing import Replace

_Loop = Callable[[Any, Any, Any, Any, Any], None]
_Take = Callable[..., tuple[bool, Any]]


def _idle(loop: _Loop) -> _Loop:
    """Return a loop for the thread that pins, which only waits for its end."""

    def run(in_queue: Any, out_queue: Any, device_id: Any, is_done: Any, device: Any) -> None:
        if this_device() is None:
            return loop(in_queue, out_queue, device_id, is_done, device)
        is_done.wait()
        return None

    return run


def _pinning(take: _Take) -> _Take:
    """Return a method that takes a batch from the workers, and pins it if the loader should."""

    def taken(self: Any, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        if this_device() is None or not self._pin_memory:
            return take(self, *args, **kwargs)
        self._data_queue = self._worker_result_queue
        is_there, data = take(self, *args, **kwargs)
        if is_there and not isinstance(data[1], ExceptionWrapper):
            data = (data[0], pin_memory.pin_memory(data[1]))  # type: ignore[no-untyped-call]
        return is_there, data

    return taken


def install(replace: Replace) -> None:
    """Let data loaders pin memory without a thread."""
    replace(pin_memory, "_pin_memory_loop", _idle(pin_memory._pin_memory_loop))
    take = _MultiProcessingDataLoaderIter._try_get_data
    replace(_MultiProcessingDataLoaderIter, "_try_get_data", _pinning(take))
