"""Load samples ahead of time, in processes forked from a process without Python threads.

A rank has threads that watch the other ranks, save, and write to TensorBoard. A fork of the rank
would lack these threads, but any lock that one of them held would stay locked in the child. In
CPython 3.11, if it is a lock of the interpreter, the child may even hang inside ``os.fork`` itself.
A rank therefore starts multiprocessing's fork server, which imports everything that loading needs,
just once, and then forks processes on request.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from distlab.production.config import Config
from distlab.production.jpegs import Coded
from distlab.production.samples import Key, blank
from distlab.production.types import Batch
from distlab.production.world import STOPS

IMPORTED = "distlab.production.loading_imports"


class Keys:
    """A sampler's batches as keys, which carry the epoch to the loader's processes."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.sampler.epoch
        for indices in self.sampler:
            yield [(epoch, index) for index in indices]

    def __len__(self) -> int:
        return len(self.sampler)


def evaluation_keys(
    num_samples: int, global_batch: int, rank: int, num_ranks: int
) -> list[list[Key]]:
    """Return this rank's part of each batch; every sample belongs to exactly one rank's part.

    All ranks get the same number of parts, because a sharded model must be called on all of them
    together; a part may be empty.
    """
    batches: Any = torch.arange(num_samples).split(global_batch)  # type: ignore[no-untyped-call]
    parts = [batch.tensor_split(num_ranks)[rank] for batch in batches]
    return [[(0, index) for index in part.tolist()] for part in parts]


def loader_of(
    samples: Any, batches: Any, config: Config, device: torch.device, *, stays: bool = False
) -> DataLoader[Any]:
    """Return a loader that loads ahead in processes, which outlive the epoch if ``stays``.

    The processes share their tensors in /dev/shm. torch checks every 5 s whether one of the
    processes has ended.
    """
    has_workers = config.num_workers > 0
    if has_workers:
        _start_server()
    return DataLoader(
        samples,
        batch_sampler=batches,
        num_workers=config.num_workers,
        persistent_workers=stays and has_workers,
        multiprocessing_context="forkserver" if has_workers else None,
        collate_fn=_Collate(config),
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # otherwise the loader would draw from the run's generator
        worker_init_fn=_prepare_worker,
    )


def _start_server() -> None:
    """Start the server that forks the loader's processes, unless it is already running.

    When torchrun or a terminal signals a rank to stop, the signal reaches the rank's whole process
    group. It must not end the loader before the rank has saved, so the server starts with such
    signals blocked, and leaves the group.
    """
    main = getattr(sys.modules["__main__"], "__spec__", None)
    main_name = [main.name] if main and not main.name.endswith("__main__") else []
    forkserver.set_forkserver_preload([IMPORTED, *main_name])  # or each child would import main
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        resource_tracker.ensure_running()  # first, because it unblocks SIGTERM and SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_worker(_worker: int) -> None:
    threading.Thread(target=_end_with_rank, daemon=True).start()
    torch.set_num_threads(1)


def _end_with_rank() -> None:
    """End this process when its rank ends; torch only watches the parent, the fork server."""
    rank = multiprocessing.parent_process()
    if rank is not None:
        rank.join()
        os._exit(1)


class _Collate:
    """Stacks samples; a rank's part of a short last batch may be empty."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, samples: Sequence[Any]) -> Batch | tuple[Coded, Tensor]:
        if not samples:
            return blank(self.config, 0)
        targets = torch.stack([torch.as_tensor(target) for _, target in samples])
        if self.config.decode == "torchvision":
            fields = zip(*[coded for coded, _ in samples], strict=True)
            return Coded(*map(torch.cat, fields)), targets
        return torch.stack([sample for sample, _ in samples]), targets
