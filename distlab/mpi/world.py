"""Join the world that mpirun started; end the whole job when a rank fails."""

import atexit
import contextlib
import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import Store, TCPStore

from distlab.mpi.group import MpiGroup
from distlab.mpi.runtime import runtime
from distlab.mpi.work import MpiWork, Steps

T = TypeVar("T")

# torch keeps the name "mpi" for builds with an MPI inside and looks for no other under it.
TORCH_NAME = "mpi4py"
FORWARD_S = 0.3  # for mpirun to pass on what a rank has printed: with the job it drops the rest


def init_process_group(timeout_s: float | None) -> None:
    """Make this process a rank of ``torch.distributed``'s world; a collective call."""
    here = runtime()
    rank, size = here.comm.rank, here.comm.size
    places = {"RANK": rank, "WORLD_SIZE": size}
    places |= {"LOCAL_RANK": here.local_rank, "LOCAL_WORLD_SIZE": here.local_size}
    os.environ.update({name: str(value) for name, value in places.items()})
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as under torchrun: the ranks share the cores
    if TORCH_NAME.upper() not in vars(dist.Backend):
        dist.Backend.register_backend(TORCH_NAME, _make_group, extended_api=True, devices=["cpu"])
    dist.init_process_group(
        TORCH_NAME,
        store=_shared_store(here.comm),
        rank=rank,
        world_size=size,
        timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
    )
    _end_the_job_on_exceptions()
    atexit.register(here.leave)


def _make_group(options: Any, _: object) -> MpiGroup:
    here = runtime()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(here.comm.size))
    return MpiGroup(here, ranks, options.group_id, options.timeout)


def _shared_store(comm: MPI.Intracomm) -> Store:
    """Make a store on a port that the system chooses, and tell the others by MPI."""
    machines = set(comm.allgather(MPI.Get_processor_name()))
    address: tuple[str, int] | None = None
    if comm.rank == 0:
        host = "127.0.0.1" if len(machines) == 1 else socket.gethostname()
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        address = (host, store.port)
    host, port = comm.bcast(address)
    return store if comm.rank == 0 else TCPStore(host, port, is_master=False)


def _end_the_job_on_exceptions() -> None:
    """Let an uncaught exception end all ranks, after its traceback."""
    show = sys.excepthook  # torch's, which begins each line with the rank

    def show_and_end(
        kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        show(kind, error, frames)
        end_the_job(1)

    sys.excepthook = show_and_end


def end_the_job(code: int) -> NoReturn:
    """End all ranks at once; mpirun returns ``code``."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(FORWARD_S)
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)  # Abort may return before mpirun's signal comes


def share(mine: T) -> list[T]:
    """Tell the others what this rank's function has returned; return the results of all.

    There is no time limit, because others may still be at work.
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
    """While others need this rank, let anything that stops it end the whole job, with a reason."""
    try:
        yield
    except SystemExit as exit:
        print(
            f"[rank{dist.get_rank()}]: sys.exit({exit.code!r}) before its function returned, so "
            "the job ends",
            file=sys.stderr,
        )
        end_the_job(exit.code if isinstance(exit.code, int) and exit.code else 1)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise
