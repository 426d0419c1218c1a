"""Bodies for task 4.8: the learner's figures."""

from collections.abc import Sequence
from typing import Any, NamedTuple

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
