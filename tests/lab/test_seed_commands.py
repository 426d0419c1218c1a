"""The commands of the course's forerunners do here what they said there.

python tests/test_phase1.py                         pytest tests/test_phase2.py
mpirun -np 2 python …                               torchrun --nproc_per_node=2 …
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_pytest import FreshPytest
from mpirun import mpirun, needs_mpi

from phase2_advanced import programs

ROOT = Path(__file__).parents[2]
LESSONS = ("model_parallel", "pipeline_parallel", "tensor_parallel")
TORCHRUN = Path(sys.executable).with_name("torchrun")
SUITES = [f"test_phase{number}.py" for number in range(1, 5)]
TIMEOUT_S = 240


def python(
    *arguments: object, folder: Path = ROOT, program: object = sys.executable
) -> "subprocess.CompletedProcess[str]":
    """Run what a user types, in a folder of the course."""
    return subprocess.run(
        [str(program), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def score(done: "subprocess.CompletedProcess[str]") -> list[str]:
    """The lines of the table of tasks, and pytest's count without the seconds."""
    counted = re.findall(r"^(?:=+ )?\d+ (?:passed|failed|xfailed).*?(?= in )", done.stdout, re.M)
    return [*re.findall(r"^.*\d\.1 .*points?.*$", done.stdout, re.M), *counted]


# --- grading -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_is_a_script_that_grades_as_pytest_does(
    suite: str, fresh_pytest: FreshPytest
) -> None:
    first_task = ("-k", f"{suite[10]}.1", "--impl", "solution")
    script = python(f"tests/{suite}", *first_task)
    by_pytest = fresh_pytest(f"tests/{suite}", *first_task)
    assert (script.returncode, by_pytest.returncode) == (0, 0), script.stdout + script.stderr
    assert score(script) == score(by_pytest) != []


@pytest.mark.usefixtures("forked")
def test_a_todo_is_not_full_marks_in_either_way(fresh_pytest: FreshPytest) -> None:
    script = python("test_phase1.py", "-k", "1.4", folder=ROOT / "tests")  # from there, too
    by_pytest = fresh_pytest("tests/test_phase1.py", "-k", "1.4")
    assert script.returncode == by_pytest.returncode == pytest.ExitCode.TESTS_FAILED
    assert score(script) == score(by_pytest) != []


# --- lessons that are programs -------------------------------------------------------------------


def test_these_are_all_lessons_that_are_programs() -> None:
    files = ROOT.glob("solutions/phase[123]*/*.py")
    assert sorted(path.stem for path in files if "__main__" in path.read_text()) == [*LESSONS]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("lesson", LESSONS)
def test_torchrun_runs_a_lesson(lesson: str) -> None:
    program = f"solutions/phase2_advanced/{lesson}.py"
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = python(*start, program, "--steps", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(", and the weights of one process\n") == 1


@needs_mpi
@pytest.mark.parametrize("lesson", ["model_parallel"])
def test_mpirun_runs_a_lesson(lesson: str) -> None:
    done = mpirun(2, str(ROOT / f"solutions/phase2_advanced/{lesson}.py"), "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(", and the weights of one process\n") == 1


def test_torchrun_runs_a_run_of_phase_4_and_goes_on(tmp_path: Path) -> None:
    options = ("--standalone", "--nproc_per_node=2", "scripts/phase4.py", tmp_path / "run")
    first, again = (python(*options, steps, program=TORCHRUN) for steps in (20, 40))
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert "begins with step 1\n" in first.stdout
    assert "goes on after step 20\n" in again.stdout
    assert re.search(r"^after step 40: ([0-9a-f]{8} ?)+$", again.stdout, re.MULTILINE)


# --- what mpirun tells a lesson ------------------------------------------------------------------

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
    found = programs._from_mpirun()
    assert found.items() >= {**OF_TORCHRUN, "MASTER_ADDR": "127.0.0.1"}.items()
    assert int(found["MASTER_PORT"]) in programs.PORTS
    assert found == programs._from_mpirun(), "all ranks have one parent, and so one port"


def test_ranks_on_several_machines_need_the_address_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {**MPICH, "PMI_SIZE": "4"})
    assert programs._from_mpirun() == {**OF_TORCHRUN, "WORLD_SIZE": "4"}
    with pytest.raises(ValueError, match="MASTER_ADDR expected"):
        programs.join()


def test_an_address_that_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**MPICH, "MASTER_PORT": "29511"})
    found = programs._from_mpirun()
    assert (found["MASTER_ADDR"], "MASTER_PORT" in found) == ("127.0.0.1", False)


def test_a_process_that_nothing_has_started_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(ValueError, match="RANK expected"):
        programs.join()
