"""This process among the others of a training: its group and its device."""

import fcntl
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from distlab.production.config import Config
from distlab.production.errors import ConfigError

LOCK_S = 10.0


@contextmanager
def joined(config: Config) -> Iterator[torch.device]:
    """Join the process group that torchrun has prepared, or be alone; yield this rank's device.

    Raises:
        ConfigError: there are fewer GPUs than processes on this node, or as many processes as
            ``num_gpus`` does not say.
    """
    device = _device(config)
    if dist.is_initialized():  # by whoever calls the trainer as a function
        yield device
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        _check_number(config, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        dist.init_process_group(backend)
    else:
        _check_number(config, 1)
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def seed_generators(seed: int, replicas: dist.ProcessGroup | None) -> None:
    """Let each replica draw other numbers, for dropout and mixup, and the same in the next run.

    The ranks of a replica draw alike: the first stage mixes images, and the last one their labels.
    """
    of_rank = seed + 1 + max(dist.get_rank(replicas), 0)
    random.seed(of_rank)
    np.random.seed(of_rank)
    torch.manual_seed(of_rank)


@contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Be the only training in a folder; rank 0 holds a lock, which ends with its process.

    Raises:
        ConfigError: on all ranks: another training is still there after LOCK_S.
    """
    holder = [""]
    with ExitStack() as stack:
        if dist.get_rank() == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(run_dir / "lock", "w"))
            holder = ["" if _locked(file) else f"another training writes into {run_dir}"]
        dist.broadcast_object_list(holder, src=0)
        if holder[0]:
            raise ConfigError(f"{holder[0]}: wait for its end, or choose another run_dir")
        yield


def _locked(file: IO[str]) -> bool:
    """Lock a file; ranks of a launcher that was killed need a moment to notice."""
    end_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.1)


def _check_number(config: Config, started: int) -> None:
    if config.num_gpus not in ("auto", started):
        raise ConfigError(
            f"num_gpus is {config.num_gpus}, and this node has started {started}: start "
            f"scripts/launch_training.sh --config …, or torchrun --nproc-per-node "
            f"{config.num_gpus}, or give --num_gpus {started}"
        )


def _device(config: Config) -> torch.device:
    wanted = config.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    number, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= there:
        raise ConfigError(
            f"process {number} of this node needs a GPU of its own, and there are {there}: start "
            "fewer processes, or give --device cpu"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)
