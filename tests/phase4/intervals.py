"""Bodies for task 4.8: the learner's figures, and a training run in which nodes fail."""

import time
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from judging.calls import case_told, typed


class Job(NamedTuple):
    """The figures that decide how often to save."""

    save_s: float
    node_mtbf_s: float
    num_nodes: int

    @property
    def mtbf_s(self) -> float:
        """Mean time between the failures of the job."""
        return self.node_mtbf_s / self.num_nodes

    def __str__(self) -> str:
        """Return the end of a sentence."""
        return (
            f"for save_s={self.save_s:g}, node_mtbf_s={self.node_mtbf_s:g}, "
            f"num_nodes={self.num_nodes}"
        )


def intervals_s(lesson: Any, function: str, jobs: Sequence[Job]) -> list[float]:
    """Return the learner's interval for each job."""
    return [_call(lesson, function, (job.save_s,), job) for job in jobs]


def durations_s(lesson: Any, cases: Sequence[tuple[float, float, float, Job]]) -> list[float]:
    """Return the expected duration of each case: work, interval, restart and job."""
    return [
        _call(lesson, "expected_duration_s", (work_s, interval_s, job.save_s, restart_s), job)
        for work_s, interval_s, restart_s, job in cases
    ]


def _call(lesson: Any, function: str, arguments: tuple[float, ...], job: Job) -> float:
    nodes = () if job.num_nodes == 1 else (job.num_nodes,)  # 1 is the default
    with case_told(f"{job}"):
        seconds = getattr(lesson, function)(*arguments, job.node_mtbf_s, *nodes)
    return float(typed(function, seconds, float))


class Training(NamedTuple):
    """A run in which each rank is a node that fails at random."""

    job: Job
    work_s: float
    restart_s: float
    seed: int


def expected_s(lesson: Any, training: Training) -> float:
    """Return the expected duration with the learner's own interval."""
    interval_s = _call(lesson, "daly_interval_s", (training.job.save_s,), training.job)
    case = training.work_s, interval_s, training.restart_s, training.job
    return durations_s(lesson, [case])[0]


def train(lesson: Any, training: Training, factor: float) -> int:
    """Train with a multiple of the learner's interval; return the number of this node's failures.

    After each interval all ranks save. After a failure comes a restart, and the interval begins
    again.
    """
    job = training.job
    interval_s = factor * _call(lesson, "daly_interval_s", (job.save_s,), job)
    node, done_s = _Node(training), 0.0
    while done_s < training.work_s:
        part_s = min(interval_s, training.work_s - done_s)
        if node.survives(part_s + job.save_s):
            done_s += part_s
        else:
            while not node.survives(training.restart_s):
                pass
    return node.failures


class _Node:
    """This rank's failures; that of one node stops all."""

    def __init__(self, training: Training) -> None:
        self.random = Random(f"{training.seed} {dist.get_rank()}")
        self.rate = 1 / training.job.node_mtbf_s
        self.now_s, self.failures = 0.0, 0
        self.fails_at_s = self.random.expovariate(self.rate)

    def survives(self, seconds: float) -> bool:
        """Work together with the others; False if a node has failed meanwhile."""
        first = torch.tensor(self.fails_at_s, dtype=torch.float64)
        dist.all_reduce(first, dist.ReduceOp.MIN)
        first_s, end_s = float(first), self.now_s + seconds
        time.sleep(min(first_s, end_s) - self.now_s)
        self.now_s = min(first_s, end_s)
        if first_s > end_s:
            return True
        if self.fails_at_s == first_s:
            self.failures += 1
            self.fails_at_s += self.random.expovariate(self.rate)
        return False
