"""Detect the launcher that started this process and its peers: mpirun, torchrun or Slurm's srun.

Each launcher describes a process in environment variables. Slurm's variables include no port, and
most of them are also set for a batch script, which is a single process; only processes that srun
started have ``SLURM_STEP_NODELIST``. Nothing here imports torch.
"""

import os
import re
from dataclasses import dataclass

from distlab.launch.errors import SetupError

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MPIRUN = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
_LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")


@dataclass(frozen=True)
class Launched:
    """The launcher that started this process, the process's rank, and the size of its world."""

    launcher: str  # "mpirun", "torchrun" or "srun"
    rank: int
    world_size: int


def launched(backend: str = "auto") -> Launched | None:
    """Return how this process was launched; None if it was not started as a rank.

    Batch systems may set mpirun's and srun's variables for a single process too, so a lone process
    counts as a rank only under torchrun, or if backend mpi is requested.

    Args:
        backend: Requested backend. srun can start MPI ranks (with ``--mpi=pmi2``) and other ranks;
            the backend decides which kind this process is.
    """
    mpirun, of_srun = _of_mpirun(), _of_srun()
    if backend == "mpi":
        return mpirun
    other = _of_torchrun() or (mpirun if mpirun and mpirun.world_size > 1 else None)
    if other is None or of_srun is None:
        return other or of_srun
    is_same = (of_srun.rank, of_srun.world_size) == (other.rank, other.world_size)
    is_for_srun = other.launcher == "torchrun" or backend in ("gloo", "nccl")
    return of_srun if is_same and is_for_srun else other


def launcher_of_several() -> str | None:
    """Return the launcher if it started other processes besides this one, else None."""
    started_by = launched()
    return started_by.launcher if started_by and started_by.world_size > 1 else None


def check_is_alone() -> None:
    """Refuse to start workers if mpirun, torchrun or srun has already started several processes.

    Raises:
        SetupError: This process is one of several.
    """
    if launcher := launcher_of_several():
        raise SetupError(f"this starts its own workers: run it alone, without {launcher}")


def speaks_for_its_machine() -> bool:
    """Return True on one rank per machine: the one that reports errors that all ranks raise."""
    return all(os.environ.get(name, "0") == "0" for name in _LOCAL_RANKS)


def _of_torchrun() -> Launched | None:
    """Read the rank from torchrun's variables; other launchers may set them, too."""
    if any(name not in os.environ for name in _TORCHRUN):
        return None
    return Launched("torchrun", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def _of_mpirun() -> Launched | None:
    for rank, size in _MPIRUN:
        if rank in os.environ and size in os.environ:
            return Launched("mpirun", int(os.environ[rank]), int(os.environ[size]))
    return None


def _of_srun() -> Launched | None:
    task = this_task()
    if task is None or int(task["WORLD_SIZE"]) == 1:
        return None
    return Launched("srun", int(task["RANK"]), int(task["WORLD_SIZE"]))


# Ports below Linux's ephemeral range and above those of well-known services.
FIRST_PORT, NUM_PORTS = 15_000, 15_000
STEPS_APART = 31  # number of ports between two jobs, enough for a job's steps

LOOPBACK = "127.0.0.1"
_NEEDED = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST")


def this_task() -> dict[str, str] | None:
    """Return the variables that torchrun would have set; None if srun did not start this process.

    MASTER_ADDR and MASTER_PORT keep the values that the user has set, if any.
    """
    if any(name not in os.environ for name in _NEEDED):
        return None
    nodes = os.environ["SLURM_STEP_NODELIST"]
    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ.get("SLURM_STEP_ID", "0"))
    meeting = {
        "MASTER_ADDR": LOOPBACK if is_on_one_node() else first_host(nodes),
        "MASTER_PORT": str(FIRST_PORT + (job * STEPS_APART + step) % NUM_PORTS),
    }
    return {
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": _num_tasks(),
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": _tasks_of_this_node(),
        **{name: os.environ.get(name, value) for name, value in meeting.items()},
    }


def is_on_one_node() -> bool:
    """Return True if all tasks of the job step are on this node."""
    return os.environ.get("SLURM_STEP_NUM_NODES") == "1"


def has_own_gpus() -> bool:
    """Return True if Slurm shows each process only its own GPUs, numbered from 0."""
    return "SLURM_GPUS_PER_TASK" in os.environ


def _num_tasks() -> str:
    """Return the number of tasks in the step; under salloc, SLURM_NTASKS may be that of the job."""
    return os.environ.get("SLURM_STEP_NUM_TASKS", os.environ["SLURM_NTASKS"])


def _tasks_of_this_node() -> str:
    if counts := os.environ.get("SLURM_STEP_TASKS_PER_NODE"):
        return str(tasks_per_node(counts)[int(os.environ.get("SLURM_NODEID", "0"))])
    return _num_tasks()


def first_host(nodes: str) -> str:
    """Return the first host of a compressed Slurm host list.

    node[01-03,07] -> node01        rack[2-3]n[5-6],login -> rack2n5
    """
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", nodes)
    return re.sub(r"\[([^]\-,]+)[^]]*\]", r"\1", first[0] if first else nodes)


def tasks_per_node(counts: str) -> list[int]:
    """Expand a compressed Slurm list of the number of tasks on each node.

    2(x3),1 -> [2, 2, 2, 1]
    """
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]
