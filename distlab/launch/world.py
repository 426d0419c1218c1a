"""The world of a rank: its number, its device, and the process group."""

import contextlib
import contextvars
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Context:
    """This rank's number, the size of its world, and the device that it should use."""

    rank: int
    world_size: int
    device: torch.device


_device: contextvars.ContextVar[torch.device] = contextvars.ContextVar("distlab_device")


def context() -> Context:
    """Return rank, world size and device; works only inside a function that ``run`` called.

    Raises:
        RuntimeError: The call is outside such a function, where there is no rank.
    """
    if not dist.is_initialized() or _device.get(None) is None:
        raise RuntimeError(
            "launch.context() was called outside a rank: call it in the function given to "
            "launch.run, not around it"
        )
    return Context(dist.get_rank(), dist.get_world_size(), _device.get())


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make ``device`` the one that ``context()`` reports, and CUDA's current device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


def init_process_group(
    backend: str, device: torch.device, timeout_s: float | None, **meeting: Any
) -> None:
    """Join the process group described by ``meeting`` or, if it is empty, torchrun's variables."""
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    own = device if backend == "nccl" else None
    dist.init_process_group(backend, timeout=timeout, device_id=own, **meeting)


def use_loopback() -> None:
    """Keep gloo on the loopback interface, unless the user chose another.

    All ranks of ``run`` are on this machine, and gloo would otherwise look up the machine's own
    name, which often fails on laptops (pytorch/pytorch#26049).
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
