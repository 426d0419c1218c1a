"""A job step of Slurm: what srun tells each process that it starts, and where they meet.

Slurm describes a process in its environment, but names no port. A batch script has most of these
variables too, and is one process only: ``SLURM_STEP_NODELIST`` tells it from what srun starts.
"""

import os
import re
from dataclasses import dataclass

# Below those that Linux gives out by itself, above those of well-known services.
FIRST_PORT, NUM_PORTS = 15_000, 15_000
STEPS_APART = 31  # of the ports of two jobs in a row: each has room for as many steps

LOOPBACK = "127.0.0.1"
_NEEDED = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST")


@dataclass(frozen=True)
class Task:
    """This process among those of its job step."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    is_on_one_node: bool  # all of the step
    master_address: str
    master_port: int

    def torchrun_variables(self) -> dict[str, str]:
        """Return what torchrun would have set; where to meet, the user may have chosen."""
        meeting = {"MASTER_ADDR": self.master_address, "MASTER_PORT": str(self.master_port)}
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            **{name: os.environ.get(name, value) for name, value in meeting.items()},
        }


def this_task() -> Task | None:
    """Return who this process is if srun has started it, else None."""
    if any(name not in os.environ for name in _NEEDED):
        return None
    nodes = os.environ["SLURM_STEP_NODELIST"]
    is_on_one_node = os.environ.get("SLURM_STEP_NUM_NODES") == "1"
    return Task(
        rank=int(os.environ["SLURM_PROCID"]),
        world_size=_num_tasks(),
        local_rank=int(os.environ["SLURM_LOCALID"]),
        local_world_size=_tasks_of_this_node(),
        is_on_one_node=is_on_one_node,
        master_address=LOOPBACK if is_on_one_node else first_host(nodes),
        master_port=_meeting_port(),
    )


def has_own_gpus() -> bool:
    """Tell whether Slurm shows each process its own GPUs alone, numbered from 0 in each."""
    return "SLURM_GPUS_PER_TASK" in os.environ


def _num_tasks() -> int:
    """Of the step: in the shell that salloc opens, a step of one, the other is the allocation's."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", os.environ["SLURM_NTASKS"]))


def _meeting_port() -> int:
    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ.get("SLURM_STEP_ID", "0"))
    return FIRST_PORT + (job * STEPS_APART + step) % NUM_PORTS


def _tasks_of_this_node() -> int:
    if counts := os.environ.get("SLURM_STEP_TASKS_PER_NODE"):
        return tasks_per_node(counts)[int(os.environ.get("SLURM_NODEID", "0"))]
    return _num_tasks()


def first_host(nodes: str) -> str:
    """Return the first of the hosts that Slurm writes in short.

    node[01-03,07] -> node01        rack[2-3]n[5-6],login -> rack2n5
    """
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", nodes)
    return re.sub(r"\[([^]\-,]+)[^]]*\]", r"\1", first[0] if first else nodes)


def tasks_per_node(counts: str) -> list[int]:
    """Return the number of tasks of each node that Slurm writes in short.

    2(x3),1 -> [2, 2, 2, 1]
    """
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]
