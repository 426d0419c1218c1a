"""The commands of the course's predecessors still work.

python tests/test_phase1.py                         pytest tests/test_phase2.py
mpirun -np 2 python …                               torchrun --nproc_per_node=2 …
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mpirun import mpirun, needs_mpi

from phase2_advanced import programs

ROOT = Path(__file__).parents[2]
LESSONS = ("model_parallel", "pipeline_parallel", "tensor_parallel")
SAME_WEIGHTS = ", and the weights of one process\n"
TIMEOUT_S = 1200


def python(*arguments: object, folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """Run ``python`` with these arguments, in a folder of the course."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


# --- grading -------------------------------------------------------------------------------------


def test_a_suite_is_a_script_that_grades_where_it_lies() -> None:
    options = ("-k", "2.9", "--impl", "solution")
    script = python("test_phase2.py", *options, folder=ROOT / "tests")
    assert script.returncode == pytest.ExitCode.OK, script.stdout + script.stderr
    assert re.search(r"^2\.9 .* total ", script.stdout, re.MULTILINE | re.DOTALL)


# --- lessons that are programs -------------------------------------------------------------------


def torchrun(*arguments: object) -> str:
    """Start two processes with torchrun; return what they print."""
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("lesson", LESSONS)
def test_torchrun_runs_a_lesson(lesson: str) -> None:
    printed = torchrun(f"solutions/phase2_advanced/{lesson}.py", "--steps", 2)
    assert printed.count(SAME_WEIGHTS) == 1


@needs_mpi
def test_mpirun_runs_a_lesson() -> None:
    done = mpirun(2, str(ROOT / "solutions/phase2_advanced/model_parallel.py"), "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(SAME_WEIGHTS) == 1


# --- variables under mpirun ----------------------------------------------------------------------

MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
OF_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize("variables", [MPICH, OPEN_MPI], ids=["MPICH", "Open MPI"])
def test_a_rank_of_mpirun_gets_the_variables_of_torchrun(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", variables)
    environment = programs._from_mpirun()
    assert environment.items() >= {**OF_TORCHRUN, "MASTER_ADDR": "127.0.0.1"}.items()
    assert int(environment["MASTER_PORT"]) in programs.PORTS
    assert environment == programs._from_mpirun(), "all ranks have one parent, and so one port"
