"""Join the world that mpirun started, and share the results of its ranks."""

import atexit
import contextlib
import os
import pickle
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.algorithms.join import Join

from distlab.mpi.ending import Ending
from distlab.mpi.group import MpiGroup
from distlab.mpi.runtime import runtime
from distlab.mpi.work import MpiWork, Steps
from distlab.process_group.joining import keeping_work

T = TypeVar("T")

# torch reserves the name "mpi" for builds that include MPI, and accepts no other backend under it.
TORCH_NAME = "mpi4py"
LOOPBACK = "127.0.0.1"
_endings: list[Ending] = []  # this process's ending, once it has joined the world


def init_process_group(timeout_s: float | None) -> None:
    """Make this process a rank of ``torch.distributed``'s world; all ranks must call this."""
    here = runtime()
    rank, size = here.comm.rank, here.comm.size
    places = {"RANK": rank, "WORLD_SIZE": size}
    places |= {"LOCAL_RANK": here.local_rank, "LOCAL_WORLD_SIZE": here.local_size}
    os.environ.update({name: str(value) for name, value in places.items()})
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as under torchrun: the ranks share the cores
    if TORCH_NAME.upper() not in vars(dist.Backend):
        join: Any = Join
        join.notify_join_context = staticmethod(keeping_work(Join.notify_join_context))
        dist.Backend.register_backend(TORCH_NAME, _make_group, extended_api=True, devices=["cpu"])
    store = _shared_store(here.comm)
    dist.init_process_group(
        TORCH_NAME,
        store=store,
        rank=rank,
        world_size=size,
        timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
    )
    _endings.append(Ending(store, rank))
    _endings[-1].watch()
    atexit.register(here.leave)


def _make_group(options: Any, _: object) -> MpiGroup:
    here = runtime()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(here.comm.size))
    return MpiGroup(here, ranks, options.group_id, options.timeout)


def _shared_store(comm: MPI.Intracomm) -> Store:
    """Create a store on a port that the system chooses, and broadcast its address over MPI."""
    is_one_machine = len(set(comm.allgather(MPI.Get_processor_name()))) == 1
    address: tuple[str, int] | None = None
    if comm.rank == 0:
        store = _store_on_loopback() if is_one_machine else _store_for_all_machines()
        address = (store.host, store.port)
    host, port = comm.bcast(address)
    return store if comm.rank == 0 else TCPStore(host, port, is_master=False)


def _store_on_loopback() -> TCPStore:
    """Create a store that other machines cannot reach: whoever reaches it may write to it."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        port = listening.getsockname()[1]
        return TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),  # the store closes it
        )


def _store_for_all_machines() -> TCPStore:
    return TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)


def share(mine: T) -> list[T]:
    """Send the other ranks the result of this rank's function; return the results of all ranks.

    There is no time limit, because the others may still be working.
    """
    here = runtime()
    pickled = np.frombuffer(pickle.dumps(mine), np.uint8)
    sizes = np.empty(here.comm.size, np.int64)
    pickles: list[bytes] = []

    def steps() -> Steps:
        yield [here.comm.Iallgather(np.array([pickled.size]), sizes)]
        row = np.empty(sizes.sum(), np.uint8)
        yield [here.comm.Iallgatherv(pickled, [row, sizes.tolist()])]
        ends = sizes.cumsum()
        pickles.extend(
            row[end - size : end].tobytes() for size, end in zip(sizes, ends, strict=True)
        )

    here.announce_return()
    MpiWork(here, steps(), "sharing the results", [], timedelta.max).wait()
    here.note_all_returned()
    return [cast("T", pickle.loads(text)) for text in pickles]


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """Mark a block in which the others need this rank: an exception in it ends the job."""
    with _endings[-1].needed():
        yield
