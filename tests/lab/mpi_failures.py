"""What mpirun starts in the tests and what is to fail there: ``mpi_failures.py PROGRAM``."""

import sys

import torch
import torch.distributed as dist

from distlab import launch


def by_raising() -> None:
    if dist.get_rank() == 1:
        raise ValueError("bad luck")
    dist.barrier()


def by_exiting() -> None:
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.recv(torch.zeros(1), 1)


def by_returning_early() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), 1)


def by_not_making_a_group() -> None:
    if dist.get_rank() == 0:
        dist.new_group()


def by_calling_something_else() -> None:
    x = torch.zeros(4)
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)


def after_the_run_by_ending() -> None:
    launch.run(dist.get_rank, 2)
    if dist.get_rank() == 0:
        dist.barrier()


FAILURES = [name for name in dir() if name.startswith(("by_", "after_"))]

if __name__ == "__main__":
    failure = globals()[sys.argv[1]]
    if failure is after_the_run_by_ending:
        failure()
    else:
        launch.run(failure, 2)
