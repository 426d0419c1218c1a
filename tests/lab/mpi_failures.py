"""Programs that fail, which the tests run under mpirun: ``mpi_failures.py PROGRAM``.

Every rank first prints the names of the shared-memory files that MPI has created.
"""

import gc
import os
import re
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from distlab import launch


def by_raising() -> None:
    if dist.get_rank() == 1:
        raise ValueError("bad luck")
    dist.barrier()


def by_being_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def by_exiting() -> None:
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.recv(torch.zeros(1), 1)


def by_returning_early() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), 1)


def by_calling_something_else() -> None:
    x = torch.zeros(4)
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)


def waits() -> None:
    time.sleep(3600)


def print_files_of_shared_memory() -> None:
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    names = {*re.findall(r"/dev/shm/mpich_shm_\w+", text)}
    sys.stdout.write(f"{' '.join(['up', *names])}\n")  # at once, so that no rank's line is cut
    sys.stdout.flush()


FAILURES = [name for name in dir() if name.startswith("by_")]

if __name__ == "__main__":
    gc.freeze()  # otherwise, the collection at exit would spend 0.4 s searching all of torch
    failure = globals()[sys.argv[1]]
    launch.run(print_files_of_shared_memory, 2)
    launch.run(failure, 2)
