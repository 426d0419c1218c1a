"""``run`` under torchrun: this process is a rank already and joins torchrun's world."""

import atexit
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from distlab.launch import world
from distlab.launch.errors import SetupError

T = TypeVar("T")


def run_joined(
    fn: Callable[..., T],
    world_size: int,
    args: tuple[object, ...],
    backend: str,
    device: torch.device,
    timeout_s: float | None,
) -> list[T]:
    """Call ``fn`` as this rank of torchrun's world; return the results of all ranks.

    The process group is joined by the first call and left when the process ends. Errors are raised
    as they are: torchrun watches and ends the ranks. ``timeout_s`` bounds each collective.

    Raises:
        SetupError: torchrun started another number of ranks than ``world_size``.
    """
    if not dist.is_initialized():
        world.init_process_group(backend, device, init_method="env://", timeout_s=timeout_s)
        atexit.register(_leave)
    if dist.get_world_size() != world_size:
        raise SetupError(
            f"torchrun started {dist.get_world_size()} ranks and the script asks for {world_size}: "
            "make the two numbers equal"
        )
    with world.on_device(device):
        mine = fn(*args)
    results: list[T | None] = [None] * world_size
    dist.all_gather_object(results, mine)
    return results  # type: ignore[return-value]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
