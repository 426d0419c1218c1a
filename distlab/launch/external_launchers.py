"""``run`` under torchrun, mpirun and srun: this process is already a rank and joins their world."""

import atexit
import os
import socket
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, it would keep the process group alive

from distlab.launch import choices, launchers, world
from distlab.launch.errors import SetupError
from distlab.launch.launchers import Launched
from distlab.util.text import counted
from distlab.util.tracebacks import is_message_enough

T = TypeVar("T")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
MPI_FIX = "pip install -c constraints.txt -e '.[mpi]' installs mpi4py and MPICH"


def run_joined(
    fn: Callable[..., T],
    world_size: int,
    args: tuple[object, ...],
    started_by: Launched,
    backend: str,
    device: str,
    timeout_s: float | None,
) -> list[T]:
    """Call ``fn`` in this process, a rank that torchrun or srun started; return all results.

    The first call joins the process group; the process leaves it on exit. Errors of ``fn``
    propagate unchanged, because the launcher watches the ranks and ends them. ``timeout_s``
    applies to each collective.

    Raises:
        SetupError: The number of ranks that the launcher started is not ``world_size``, there are
            too few GPUs, or the ranks cannot connect to each other.
    """
    _check_size(started_by, world_size)
    if started_by.launcher == "srun" and (task := launchers.this_task()):
        os.environ.update(task)
        if launchers.is_on_one_node():
            world.use_loopback()
    chosen, own = choices.own_device(backend, device, started_by)
    if not dist.is_initialized():
        _join(chosen, own, timeout_s)
        atexit.register(_leave)
    with world.on_device(own):
        mine = fn(*args)
    results: list[T | None] = [None] * world_size
    dist.all_gather_object(results, mine)
    return results  # type: ignore[return-value]


def _check_size(started_by: Launched, world_size: int) -> None:
    if started_by.world_size != world_size:
        started = counted(started_by.world_size, "rank")
        raise SetupError(
            f"{started_by.launcher} started {started} and the script asks for {world_size}: "
            "make the two numbers equal"
        )


def _join(backend: str, device: torch.device, timeout_s: float | None) -> None:
    try:
        # Fail immediately if the host is unknown; torch would keep trying for half an hour.
        socket.getaddrinfo(os.environ["MASTER_ADDR"], None)
        world.init_process_group(backend, device, timeout_s)
    except (OSError, RuntimeError) as error:
        raise SetupError(_why_not_joined(error)) from error


def _why_not_joined(error: Exception) -> str:
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    reason = str(error).strip().partition("\n")[0]
    set_ones = [f"{name}={os.environ.get(name, '(not set)')}" for name in INTERFACES]
    return (
        f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} could not join the process group "
        f"at {where}: {reason}\n"
        "If the ranks are on several machines, each must reach the others at the addresses that "
        f"they give: here {' and '.join(set_ones)}. Set them to the interface that leads to the "
        "other machines (ip -br address lists them); see docs/clusters.md"
    )


def run_under_mpirun(
    fn: Callable[..., T],
    world_size: int,
    args: tuple[object, ...],
    started_by: Launched | None,
    timeout_s: float | None,
) -> list[T]:
    """Call ``fn`` in this process, a rank that mpirun started; return the results of all ranks.

    The first call joins the world. mpirun does not notice when a rank fails while others wait for
    it, so an error that stops ``fn`` is printed and ends the whole job.

    Raises:
        SetupError: mpirun did not start this process, the number of ranks that it started is not
            ``world_size``, or mpi4py is missing or does not work.
    """
    if started_by is None:
        raise SetupError(
            "backend mpi needs ranks that mpirun started: put mpirun -np "
            f"{world_size} in front of the same command"
        )
    if not dist.is_initialized():
        _report_once()
    _check_size(started_by, world_size)
    try:
        import mpi4py.MPI  # noqa: F401  (starts MPI, or says why it cannot)
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no MPI library
        raise SetupError(f"backend mpi does not work here ({error}): {MPI_FIX}") from error
    from distlab.mpi import world as mpi

    if not dist.is_initialized():
        mpi.init_process_group(timeout_s)
    with mpi.needed(), world.on_device(torch.device("cpu")):
        return mpi.share(fn(*args))


def _report_once() -> None:
    """Print distlab's own errors, which every rank raises, only once per machine."""
    show = sys.excepthook

    def show_once(
        kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        if not is_message_enough(error):
            show(kind, error, frames)
        elif launchers.speaks_for_its_machine():
            print(error, file=sys.stderr)

    sys.excepthook = show_once


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
