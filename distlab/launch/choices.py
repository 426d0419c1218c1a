"""Checks that ``run`` and ``simulate`` make before anything starts, and the choice of devices."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from distlab.launch.errors import SetupError
from distlab.launch.launchers import Launched, has_own_gpus, launched
from distlab.launch.limits import Limits
from distlab.launch.protocol import pickled

if TYPE_CHECKING:
    from distlab.sim import Cluster

BACKENDS = ("auto", "gloo", "nccl", "sim", "mpi")
DEVICES = ("auto", "cpu", "cuda")


def check(fn: object, world_size: int, backend: str, device: str) -> None:
    """Refuse impossible requests, and requests for a world that several processes would each start.

    Raises:
        SetupError: The request is impossible; the message says what is possible instead.
    """
    if sys.platform == "win32":
        raise SetupError(
            "real processes need Linux or macOS: on Windows, use WSL2 (wsl --install) and run the "
            "course inside it"
        )
    if not callable(fn):
        raise SetupError(f"run needs a function, got {fn!r}")
    if not isinstance(world_size, int) or world_size < 1:
        raise SetupError(f"world_size must be a whole number of at least 1, got {world_size!r}")
    for name, value, valid in (("backend", backend, BACKENDS), ("device", device, DEVICES)):
        if value not in valid:
            raise SetupError(f"{name} must be one of {', '.join(valid)}; got {value!r}")
    started_by = launched(backend)
    if started_by and started_by.world_size > 1:
        _check_launcher(started_by.launcher, world_size, backend)
    if dist.is_initialized() and not started_by:
        raise SetupError("run was called inside a world: a rank cannot start another world")


def _check_launcher(launcher: str, world_size: int, backend: str) -> None:
    if backend == "sim":
        raise SetupError(
            f"{launcher} started several of these processes, and each would simulate all "
            f"{world_size} ranks: backend sim needs one process only, so leave {launcher} out"
        )
    if launcher == "mpirun" and backend not in ("auto", "mpi"):
        raise SetupError(
            f"mpirun started several of these processes, and each would start {world_size} ranks "
            f"of backend {backend}: use backend mpi, or leave mpirun out"
        )


def check_for_backend(
    backend: str, device: str, cluster: "Cluster | str | None", output_dir: Path | str | None
) -> None:
    """Refuse arguments that the backend does not support.

    Raises:
        SetupError: An argument does not suit the backend; the message says why.
    """
    if cluster is not None and backend != "sim":
        raise SetupError(f"cluster={cluster!r} is for backend sim, not for backend {backend}")
    if backend == "mpi" and device == "cuda":
        raise SetupError("backend mpi moves tensors on the CPU: use device cpu")
    if backend != "sim":
        return
    if device == "cuda":
        raise SetupError("backend sim computes on the CPU, with simulated GPUs: use device cpu")
    if output_dir is not None:
        raise SetupError(
            f"output_dir={str(output_dir)!r} is for real processes: all ranks of backend sim print "
            "to the output of one"
        )


def limits_of(timeout_s: float | None, limits: Limits | None) -> Limits:
    """Return the limits of a call, given in full or by the shorthand ``timeout_s``.

    Raises:
        SetupError: Both are given, or a limit is not positive.
    """
    if limits is None:
        return Limits(timeout_s)
    if timeout_s != Limits.timeout_s:
        raise SetupError(
            f"timeout_s={timeout_s!r} is given as well as limits={limits}: put it into the limits"
        )
    return limits


def devices(backend: str, device: str, num_ranks: int) -> tuple[str, tuple[str, ...]]:
    """Choose the backend, and a device for each rank on this machine.

    Raises:
        SetupError: There are too few GPUs.
    """
    num_gpus = torch.cuda.device_count()
    if backend == "auto":
        fits = device != "cpu" and num_gpus >= num_ranks and dist.is_nccl_available()
        backend = "nccl" if fits else "gloo"
    if backend == "nccl" and (num_gpus < num_ranks or device == "cpu"):
        raise SetupError(
            f"backend nccl needs a GPU per rank: {num_ranks} ranks, {num_gpus} GPUs, device "
            f"{device}. Use fewer ranks, or backend gloo"
        )
    if device == "cuda" and not num_gpus:
        raise SetupError("device cuda: torch sees no GPU here. Use device cpu; see distlab doctor")
    if backend == "nccl" or device == "cuda":
        return backend, tuple(f"cuda:{rank % num_gpus}" for rank in range(num_ranks))
    return backend, ("cpu",) * num_ranks


def own_device(backend: str, device: str, started_by: Launched) -> tuple[str, torch.device]:
    """Choose the backend and the device for this process, which torchrun or srun started.

    Raises:
        SetupError: There are too few GPUs.
    """
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if started_by.launcher == "srun" and has_own_gpus():
        num_local, local_rank = 1, 0
    chosen, of_ranks = devices(backend, device, num_local)
    return chosen, torch.device(of_ranks[local_rank])


def payload(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    """Pickle the function that the ranks will call, together with its arguments.

    Raises:
        SetupError: The function or an argument cannot be pickled; the message names it.
    """
    try:
        return pickled((fn, args))
    except Exception as error:
        name, value = _unpicklable(fn, args)
        raise SetupError(
            f"{name}, {value!r}, cannot be sent to the ranks ({error}): build such objects "
            "inside the function"
        ) from error


def _unpicklable(fn: object, args: tuple[object, ...]) -> tuple[str, object]:
    for i, value in enumerate(args):
        try:
            pickled(value)
        except Exception:
            return f"argument {i}", value
    return "the function", fn
