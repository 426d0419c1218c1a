"""The mpi world gives gloo's results, counts its calls, and never hangs."""

import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import mpi_failures
import mpi_ranks
import programs
import pytest
import torch.distributed as dist
import trainings
from mpirun import mpirun, needs_mpi
from same import assert_same

from distlab import launch
from distlab.doctor import find_mpirun
from distlab.launch.launchers import Launched, launched

WORLD_SIZE = mpi_ranks.TRAINED_ON
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mpi")


@cache
def on_mpi(folder: Path) -> list[dict[str, Any]]:
    """Return each rank's results of ``all_of_it``, which mpirun runs only once."""
    output = folder / "results"
    done = mpirun(WORLD_SIZE, str(HERE / "mpi_ranks.py"), str(WORLD_SIZE), str(output))
    assert done.returncode == 0, done.stderr
    results, again = pickle.loads(output.read_bytes())
    assert again == list(range(WORLD_SIZE)), "a second run joins the same world"
    return results


def part(name: str, folder: Path) -> list[Any]:
    return [results[name] for results in on_mpi(folder)]


@cache
def on_gloo(program: Any, *args: object) -> list[Any]:
    return launch.run(program, WORLD_SIZE, *args, backend="gloo", timeout_s=100)


# --- the same as on gloo -------------------------------------------------------------------------


@needs_mpi
@pytest.mark.parametrize("name", sorted(programs.CALLS.keys() - mpi_ranks.GLOO_ONLY))
def test_call_gives_what_it_gives_on_gloo(name: str, folder: Path) -> None:
    ours = [calls[name] for calls in part("calls", folder)]
    gloos = [calls[name] for calls in on_gloo(programs.all_calls)]
    assert_same(ours, gloos, tolerance=0.0)


@needs_mpi
@pytest.mark.parametrize("name", trainings.TRAININGS)
def test_training_gives_what_it_gives_on_gloo(name: str, folder: Path) -> None:
    ours = [trained[name] for trained in part("trainings", folder)]
    gloos = [t[name] for t in on_gloo(trainings.all_trainings)]
    assert_same(ours, gloos, tolerance=1e-12)  # MPI adds four numbers in a different order


# --- only on MPI ---------------------------------------------------------------------------------


@needs_mpi
def test_a_group_counts_calls_and_bytes(folder: Path) -> None:
    for calls, num_bytes in part("counts", folder):
        assert calls == {"all_reduce": 2, "broadcast": 1, "all_gather": 1}
        assert num_bytes == {"all_reduce": 440, "broadcast": 24, "all_gather": 8 * WORLD_SIZE}


@needs_mpi
def test_sends_that_nobody_waits_for_arrive_whole(folder: Path) -> None:
    assert part("forgotten", folder) == [[float(k) for k in range(100)]] * WORLD_SIZE


@needs_mpi
def test_what_cannot_be_moved_is_refused_at_the_call(folder: Path) -> None:
    for refusals in part("refusals", folder):
        assert [text.split(":")[0] for text in refusals] == [
            "ValueError",
            *["RuntimeError"] * 4,
        ]
        assert "MPI moves tensors on the CPU, but got one on meta" in refusals[0]


@needs_mpi
def test_the_trainer_trains_under_mpirun(tmp_path: Path) -> None:
    small = ["--data=synthetic", "--epochs=1", "--communication_pattern=native"]
    done = mpirun(2, "-m", "distlab", "train", *small, "--backend=mpi", f"--run_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("epoch 1 of 1: ") == 1, "one process reports"
    # 32 steps, with an all-reduce for each of the CNN's 8 parameters.
    [calls] = re.findall(
        r"collectives of rank 0 among all ranks: .*?(\d+) all_reduce ", done.stderr
    )
    assert 32 * 8 < int(calls) < 32 * 10
    assert (tmp_path / "result.json").exists()


# --- failures ------------------------------------------------------------------------------------

SAID: dict[str, Sequence[str]] = {
    "by_raising": ["[rank1]: ValueError: bad luck", "raise ValueError("],
    "by_being_killed": [],  # mpirun itself reports this
    "by_exiting": ["[rank1]: sys.exit(3) before its function returned"],
    "by_returning_early": [
        "RankLeft: rank 0 of 2 in recv from rank 1, (1,) float32, tag 0: rank 1 returned or ended"
    ],
    "by_calling_something_else": [
        "called ",
        "all_reduce #0 (op SUM, size 4, dtype float32)",
        "broadcast #0 (root 0, size 4, dtype float32)",
    ],
}


@cache
def failures() -> dict[str, subprocess.CompletedProcess[str]]:
    """Run all failing programs, two at a time, since they mostly wait; return the finished jobs."""
    program = str(HERE / "mpi_failures.py")
    with ThreadPoolExecutor(2) as pool:
        runs = {name: pool.submit(mpirun, 2, program, name) for name in mpi_failures.FAILURES}
        return {name: run.result() for name, run in runs.items()}


@needs_mpi
@pytest.mark.parametrize("name", mpi_failures.FAILURES)
def test_a_rank_that_fails_ends_the_job_and_says_why(name: str) -> None:
    done = failures()[name]
    codes = {"by_exiting": 3, "by_being_killed": 9}
    assert done.returncode == codes.get(name, 1), done.stderr
    for text in SAID[name]:
        assert done.stderr.count(text) == 1, done.stderr


@needs_mpi
@pytest.mark.skipif(sys.platform != "linux", reason="MPICH has these files on Linux only")
@pytest.mark.parametrize("name", mpi_failures.FAILURES)
def test_a_job_that_fails_leaves_no_shared_memory_behind(name: str) -> None:
    files = set(re.findall(r"/dev/shm/\S+", failures()[name].stdout))
    assert files
    assert not [file for file in files if Path(file).exists()]


@needs_mpi
def test_ctrl_c_ends_the_job_with_a_line_and_its_exit_code() -> None:
    command = [find_mpirun() or "", "-np", "2", sys.executable, str(HERE / "mpi_failures.py")]
    with subprocess.Popen(
        [*command, "waits"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout
        assert job.stderr
        # Each rank prints a line once it has joined.
        files = [job.stdout.readline().split() for _ in range(2)]
        job.send_signal(signal.SIGINT)
        said = [line for line in job.stderr if not line.startswith("[mpiexec@")]
        assert job.wait(timeout=60) == 130
    assert said == ["interrupted\n"]
    assert not [name for _, *names in files for name in names if Path(name).exists()]


@needs_mpi
def test_what_all_ranks_refuse_one_rank_reports() -> None:
    done = mpirun(2, "-m", "distlab", "train", "--backend=mpi", "--epochs=many")
    assert done.returncode == 78, done.stderr
    assert done.stderr.startswith("error: the command line: epochs: 'many' is wrong")
    assert done.stderr.count("\n") == 1


@needs_mpi
def test_ranks_of_one_machine_meet_where_no_other_machine_reaches_them(folder: Path) -> None:
    of_first, *others = part("store listens on", folder)
    assert of_first == ["127.0.0.1"]
    assert others == [[]] * (WORLD_SIZE - 1)


DISAGREEMENTS = {
    "size": [
        "Mismatch: rank 0 of 4 in all_reduce #0 (op SUM, size 4, dtype float32): rank 1 called "
        "all_reduce #0 (op SUM, size 5, dtype float32): every rank of a group must make the same",
        "Mismatch: rank 1 of 4 in all_reduce #0 (op SUM, size 5, dtype float32): rank 0 called "
        "all_reduce #0 (op SUM, size 4, dtype float32): every rank of a group must make the same",
    ],
    "dtype": ["rank 1 called all_reduce #0 (op SUM, size 4, dtype int32)", "dtype float32)"],
    "longer": [
        "nothing was raised",
        "Mismatch: rank 1 of 4 in recv from rank 0, (2,) float32, tag 0: got a longer message",
    ],
    "shorter": [
        "nothing was raised",
        "Mismatch: rank 1 of 4 in recv from rank 0, (4,) float32, tag 0: expected 16 bytes, and "
        "rank 0 sent 12",
    ],
    "parts": ["expects 2 elements from rank 1, which sends 1", "got a longer message"],
    "time": [
        "TimeIsUp: rank 0 of 4 in recv from rank 1, (1,) float32, tag 0: not done after 0.2 s; it "
        "needs rank 1",
        "nothing was raised",
    ],
}


@needs_mpi
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_both_sides_of_a_disagreement_are_named(name: str, folder: Path) -> None:
    said = part("disagreements", folder)
    for rank, text in enumerate(DISAGREEMENTS[name]):
        assert text in said[rank][name]


def test_outside_mpirun_the_error_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PMI_RANK", raising=False)
    with pytest.raises(launch.SetupError, match=r"put mpirun -np 4 in front of the same command$"):
        launch.run(dist.get_rank, 4, backend="mpi")


def test_worlds_that_start_their_own_ranks_are_refused_under_mpirun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(launch.SetupError, match="each would start 2 ranks of backend gloo"):
        launch.run(dist.get_rank, 2, backend="gloo")
    with pytest.raises(launch.SetupError, match="moves tensors on the CPU"):
        launch.run(dist.get_rank, 2, backend="mpi", device="cuda")


@pytest.mark.parametrize(
    ("rank", "size"),
    [("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")],
)
def test_the_number_of_workers_comes_from_mpirun(
    rank: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rank, "0")
    monkeypatch.setenv(size, "3")
    assert launched() == launched("mpi") == Launched("mpirun", 0, 3)
    monkeypatch.setenv(size, "1")  # a batch system may set this for any process
    assert launched() is None
    assert launched("mpi") == Launched("mpirun", 0, 1)


def test_backend_mpi_without_a_library_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(launch.SetupError, match=r"pip install .*\.\[mpi\]"):
        launch.run(dist.get_rank, 1, backend="mpi")
