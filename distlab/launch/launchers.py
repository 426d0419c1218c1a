"""Which launcher started this process and others like it: mpirun, torchrun or Slurm's srun.

Each tells a process who it is in its environment. Nothing here imports torch.
"""

import os
from dataclasses import dataclass

from distlab.launch import srun

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MPIRUN = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
_LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")


@dataclass(frozen=True)
class Launched:
    """This process among those that one launcher started."""

    launcher: str  # "mpirun", "torchrun" or "srun"
    rank: int
    world_size: int


def launched(backend: str = "auto") -> Launched | None:
    """Return who this process is if it was started as a rank; None: it starts its own ranks.

    Batch systems start single processes as mpirun and srun start many, so one that is alone is a
    rank only of torchrun, or where backend mpi is asked for.

    Args:
        backend: what is asked for. srun can start ranks for MPI (``--mpi=pmi2``), and others.
    """
    mpirun, of_srun = _of_mpirun(), _of_srun()
    if backend == "mpi":
        return mpirun
    if found := _of_torchrun():
        is_same = of_srun and (of_srun.rank, of_srun.world_size) == (found.rank, found.world_size)
        return of_srun if is_same else found
    if mpirun and mpirun.world_size > 1:
        is_same = of_srun and (of_srun.rank, of_srun.world_size) == (mpirun.rank, mpirun.world_size)
        return of_srun if is_same and backend in ("gloo", "nccl") else mpirun
    return of_srun


def launcher_of_several() -> str | None:
    """Name what started this process and others; None: it is alone."""
    found = launched()
    return found.launcher if found and found.world_size > 1 else None


def speaks_for_its_machine() -> bool:
    """Tell whether to report what all ranks of mpirun meet alike, a wrong option for example."""
    return all(os.environ.get(name, "0") == "0" for name in _LOCAL_RANKS)


def _of_torchrun() -> Launched | None:
    """torchrun, or another launcher that sets its variables."""
    if any(name not in os.environ for name in _TORCHRUN):
        return None
    return Launched("torchrun", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def _of_mpirun() -> Launched | None:
    for rank, size in _MPIRUN:
        if rank in os.environ and size in os.environ:
            return Launched("mpirun", int(os.environ[rank]), int(os.environ[size]))
    return None


def _of_srun() -> Launched | None:
    task = srun.this_task()
    is_several = task is not None and task.world_size > 1
    return Launched("srun", task.rank, task.world_size) if task and is_several else None
