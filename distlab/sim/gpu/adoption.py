"""Tensors that torch's C++ code makes for a GPU, although it takes the GPU's tensors for the CPU's.

C++ code asks a tensor for its device and makes another one there: the buckets of
DistributedDataParallel, or zeros in a backward pass. So it asks for the CPU's memory.
"""

import sys
from types import FrameType
from typing import Any

from torch import Tensor, _ops
from torch.autograd import graph
from torch.distributed import utils
from torch.nn.parallel import distributed
from torch.utils import _device, _stats

from distlab import process_group
from distlab.sim.gpu.placement import index_of

_BACKWARD, _DDP, _UTILS = graph.__file__, distributed.__file__, utils.__file__


def made_for_gpu(source: int) -> int:
    """Return the GPU for which C++ code makes a tensor; -1 if it is one of the host.

    Args:
        source: Number of the GPU that holds the operation's arguments, as in a backward pass's cast
            to another dtype; -1 for the host.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return -1
    file = frame.f_code.co_filename
    if file == _BACKWARD:
        return source if source >= 0 else _place(frame.f_locals.get("t_outputs", ()))
    if file == _DDP:
        return source if source >= 0 else _place_of_ddp(frame.f_locals.get("self"))
    if file == _UTILS:  # it compares the shapes of parameters
        return _place(frame.f_locals.get("tensors", ()))
    return -1


_SIMULATOR = __file__.rpartition("gpu")[0], process_group.__file__.rpartition("__init__")[0]


# torch gives the functions of _ops this name without a folder.
_OF_TORCH = {_device.__file__, _stats.__file__, _ops.__file__, "_ops.py"}


def _is_between(file: str) -> bool:
    return file.startswith((*_SIMULATOR, "<")) or file in _OF_TORCH


def _place(tensors: Any) -> int:
    return max((index_of(t) for t in tensors if isinstance(t, Tensor)), default=-1)


def _place_of_ddp(ddp: Any) -> int:
    return _place(list(ddp.parameters())[:1]) if hasattr(ddp, "parameters") else -1
