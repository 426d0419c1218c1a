"""Start Python under mpirun, as a user does."""

import importlib.util
import os
import subprocess
import sys

import processes
import psutil
import pytest

from distlab.doctor import find_mpirun

needs_mpi = pytest.mark.skipif(
    not (find_mpirun() and importlib.util.find_spec("mpi4py")),
    reason="no mpi4py and mpirun here: pip has no mpich for this platform",
)


def mpirun(
    world_size: int, *command: str, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run Python under mpirun, and check that it leaves no processes behind."""
    mark = f"{os.getpid()}-{world_size}-{hash(command)}"
    done = subprocess.run(
        [find_mpirun() or "", "-np", str(world_size), sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=240,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            processes.MARK: mark,
            **environment,
        },
    )
    assert not left_behind(mark)
    return done


def left_behind(mark: str) -> list[psutil.Process]:
    """Wait up to ten seconds for a job's processes to end; return those still alive."""
    return psutil.wait_procs(processes.marked(mark), timeout=10)[1]
