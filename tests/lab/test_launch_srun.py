"""launch.run and ``distlab train`` in tasks that Slurm's srun starts and numbers."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab import launch
from distlab.launch import choices, launchers

pytestmark = pytest.mark.usefixtures("forked")

# Runs a command as srun does, on two "nodes" with two tasks each, and ends as srun does: with the
# highest exit code. The variables are those of Slurm 22.05.
FAKE_SRUN = """
import os, subprocess, sys

number, *command = sys.argv[1:]
tasks = []
for rank in range(int(number)):
    step = {
        "SLURM_JOB_ID": os.environ.get("FAKE_JOB_ID", "4711"),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": number,
        "SLURM_STEP_NUM_TASKS": number,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_STEP_NODELIST": "localhost,node[07-09]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }
    tasks.append(subprocess.Popen(command, env={**os.environ, **step}))
sys.exit(max(task.wait() for task in tasks))
"""

SCRIPT = """
import os
import torch, torch.distributed as dist
from distlab import launch

def total():
    x = torch.ones(1)
    dist.all_reduce(x)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return dist.get_rank(), float(x), [int(os.environ[name]) for name in names]

first, again = launch.run(total, 4), launch.run(total, 4)
assert first == again == [(rank, 4.0, [rank, 4, rank % 2, 2]) for rank in range(4)], first
print(f"rank {dist.get_rank()} agrees\\n", end="", flush=True)  # in one write
"""


@pytest.fixture
def fake_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    monkeypatch.setenv("FAKE_JOB_ID", str(os.getpid()))  # gives this run its own port
    path = tmp_path / "launchers.py"
    path.write_text(FAKE_SRUN)

    def run(num_tasks: int, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(path), str(num_tasks), sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    return run


@pytest.fixture
def as_task(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets Slurm's variables for task 3 of 4, with two tasks per node."""

    def arrange(**others: str) -> None:
        variables = {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "2",
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": "3",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "1",
            "SLURM_STEP_NODELIST": "node[01-02]",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        }
        for name, value in {**variables, **others}.items():
            monkeypatch.setenv(name, value)

    return arrange


def test_a_script_joins_the_world_that_srun_started(fake_srun: Any, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = fake_srun(4, str(tmp_path / "script.py"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} agrees" for rank in range(4)]


def test_the_train_command_trains_under_srun(fake_srun: Any, tmp_path: Path) -> None:
    small = "--data=synthetic", "--epochs=1", "--backend=gloo", f"--run_dir={tmp_path / 'run'}"
    done = fake_srun(2, "-m", "distlab", "train", *small)
    assert done.returncode == 0, done.stderr
    assert "cnn on synthetic, strategy course, 2 ranks: " in done.stderr
    assert done.stderr.count("epoch 1 of 1: ") == 1, "one process reports"


def test_a_task_is_described_as_torchrun_would(as_task: Any) -> None:
    as_task()
    assert launchers.this_task() == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node01",
        "MASTER_PORT": str(
            launchers.FIRST_PORT + (4711 * launchers.STEPS_APART + 2) % launchers.NUM_PORTS
        ),
    }


def test_a_batch_script_is_no_task_of_srun(as_task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    as_task()
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    assert launchers.this_task() is None
    assert launch.run(dist.get_rank, 2) == [0, 1]


def test_the_variables_that_older_versions_lack_are_not_needed(
    as_task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_task()
    for name in ("NUM_NODES", "TASKS_PER_NODE", "ID"):
        monkeypatch.delenv(f"SLURM_STEP_{name}")
    task = launchers.this_task() or {}
    assert (task["RANK"], task["WORLD_SIZE"], task["MASTER_ADDR"]) == ("3", "4", "node01")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node[01-03,07]", "node01"),
        ("node[7,9-11]", "node7"),
        ("login,node[01-03]", "login"),
        ("rack[2-3]n[05-06],login", "rack2n05"),
        ("gpu-a[10]-ib", "gpu-a10-ib"),
    ],
)
def test_the_first_host_of_a_list_is_written_out(nodes: str, first: str) -> None:
    assert launchers.first_host(nodes) == first


# Requests that do not fit


def test_another_number_of_tasks_is_refused(as_task: Any) -> None:
    as_task()
    with pytest.raises(launch.SetupError, match="srun started 4 ranks and the script asks for 2"):
        launch.run(dist.get_rank, 2)


def test_worlds_that_need_one_process_are_refused(as_task: Any) -> None:
    as_task()
    with pytest.raises(launch.SetupError, match="leave srun out"):
        launch.run(dist.get_rank, 2, backend="sim")
    with pytest.raises(launch.SetupError, match="run it alone, without srun"):
        launchers.check_is_alone()


def test_ranks_of_an_mpi_that_srun_started_use_mpi_unless_told_otherwise(
    as_task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_task()
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("PMI_SIZE", "4")
    found = [launchers.launched(backend) for backend in ("auto", "mpi", "gloo", "nccl")]
    assert [it and it.launcher for it in found] == ["mpirun", "mpirun", "srun", "srun"]


@pytest.mark.parametrize(
    ("variables", "num_gpus", "device"),
    [
        ({}, 2, "cuda:1"),  # both tasks of a node see both GPUs
        ({"SLURM_GPUS_PER_TASK": "1"}, 1, "cuda:0"),  # each task sees only its own
    ],
)
def test_a_task_takes_a_gpu_of_its_own(
    as_task: Any,
    variables: dict[str, str],
    num_gpus: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_task(**variables)
    found = launchers.launched()
    assert found
    for name, value in (launchers.this_task() or {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert choices.own_device("auto", "auto", found) == ("nccl", torch.device(device))
