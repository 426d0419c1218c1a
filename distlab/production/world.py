"""The process group and the device of this rank."""

import fcntl
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from distlab.launch.launchers import has_own_gpus
from distlab.production.config import Config
from distlab.production.errors import ConfigError, InUseError
from distlab.production.evidence import FLIGHT_RECORDER

LEAVE_S = 10.0  # longest wait for the end of the process group after an error
# Longest wait for the lock of a run that is ending. torchrun's three restarts make it four waits,
# which outlast the 90 s that an NFS server keeps the lock of a node that was lost.
LOCK_S = 30.0
JOIN_S = 60.0  # lowest time limit for joining: Python has much to import
WAIT_S = 1800.0  # lowest time limit of a collective: rank 0 may write a last checkpoint for minutes
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # the last one is Slurm's


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a training run, except those that this process ignores.

    A simulated rank is a thread, and gets none.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def joined(config: Config) -> Iterator[torch.device]:
    """Join the process group that torchrun has prepared, or train alone; yield this rank's device.

    Raises:
        ConfigError: This node has fewer GPUs than processes, or a number of processes other than
            ``num_gpus``.
        DistError: A rank did not join within ``heartbeat_timeout_s``, or within 60 s if that is
            longer.
    """
    if dist.is_initialized():  # the trainer is called as a function
        yield _device(config) if dist.get_backend() in ("gloo", "nccl") else torch.device("cpu")
        return
    if config.backend in ("sim", "mpi"):
        raise ConfigError(
            f"backend: {config.backend}: start distlab train, which simulates ranks or joins those "
            "of mpirun"
        )
    device = _device(config)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", FLIGHT_RECORDER)
    fitting = "nccl" if device.type == "cuda" else "gloo"
    backend = fitting if config.backend == "auto" else config.backend
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=max(config.heartbeat_timeout_s, WAIT_S)),
        "device_id": device if backend == "nccl" else None,  # then NCCL connects at once
    }
    if "RANK" in os.environ:
        _check_number(config, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        _join(backend, timedelta(seconds=max(config.heartbeat_timeout_s, JOIN_S)), options)
    else:
        _check_number(config, 1)
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, **options)
    yield device  # after an error, ``leave`` leaves the group
    dist.destroy_process_group()


def leave(*, has_crashed: bool) -> bool:
    """Leave the process group after an error; return False if that takes more than ``LEAVE_S``.

    On NCCL, destroying a group waits for the other ranks, which may wait for this one in a
    collective. A rank that has crashed therefore aborts its groups. A rank that ends on purpose has
    usually told the others, whose last messages an abort would cut off.
    """
    if not dist.is_initialized():
        return True
    abort = has_crashed and dist.get_world_size() > 1
    end = dist.distributed_c10d._abort_process_group if abort else dist.destroy_process_group

    def quietly() -> None:
        with suppress(Exception):  # the first error has been told
            end()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(LEAVE_S)
    return not thread.is_alive()


def _join(backend: str, timeout: timedelta, options: Mapping[str, Any]) -> None:
    """Join the ranks that torchrun has started, through its store; fail if one is late.

    All starts of a torchrun agent share one store, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is
    set for torchrun. In a shared store, a restarted rank would find the addresses of processes that
    have ended, and wait for them. On one node, each start therefore uses its own key prefix. On
    several nodes, the agents count their restarts separately, so the variable must be set.
    """
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"start {start}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)


def control_group() -> dist.ProcessGroup | None:
    """Return a group of all ranks for small messages, which need not wait for any GPU."""
    return dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else None


def seed_generators(seed: int, replicas: dist.ProcessGroup | None) -> None:
    """Seed the random generators: differently for each replica, but the same way in every run.

    All ranks of a replica draw the same numbers, because the first stage mixes the images, and the
    last stage must mix the labels in the same way.
    """
    of_rank = seed + 1 + max(dist.get_rank(replicas), 0)
    random.seed(of_rank)
    np.random.seed(of_rank)
    torch.manual_seed(of_rank)


@contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Create a folder if needed, and lock it for this run until the block or rank 0 ends.

    An exit code left by an earlier start is removed.

    Raises:
        ConfigError: The folder can't be created; raised on all ranks.
        InUseError: Another run holds the lock; raised on all ranks.
    """
    with ExitStack() as stack:
        error = [_enter(run_dir, stack) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(error, src=0)
        if error[0]:
            raise error[0]
        yield


def _enter(run_dir: Path, stack: ExitStack) -> ConfigError | InUseError | None:
    """Create and lock the folder; return the error if that failed."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context((run_dir / "lock").open("w"))
        if not _locked(file):
            return InUseError(
                f"another training writes into {run_dir}: wait for its end, or choose another "
                "run_dir. If its node was lost, run this again when the file server has let go"
            )
        (run_dir / "exit_code").unlink(missing_ok=True)
    except OSError as error:
        return ConfigError(f"run_dir: {error}")
    return None


def _locked(file: IO[str]) -> bool:
    """Lock a file; return False if another run, perhaps a killed one, holds the lock too long.

    The lock belongs to this process alone; a lock made by flock would stay with any worker that
    outlives the process.
    """
    end_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.1)


def _check_number(config: Config, started: int) -> None:
    if config.num_gpus not in ("auto", started):
        raise ConfigError(
            f"num_gpus is {config.num_gpus}, and this node has started {started}: start "
            f"distlab train, or torchrun --nproc-per-node {config.num_gpus}, or give "
            f"--num_gpus {started}"
        )


def _device(config: Config) -> torch.device:
    wanted = config.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    number = 0 if has_own_gpus() else number
    if number >= count:
        raise ConfigError(
            f"process {number} of this node needs a GPU of its own, and there are {count}: start "
            "fewer processes, or give --device cpu"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)
