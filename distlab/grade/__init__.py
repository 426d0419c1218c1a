"""The grader: a pytest plugin that judges a learner's functions by what defines them.

    @task("1.5")
    def test_every_rank_gets_what_src_has(grade: Grade) -> None:
        run = grade.run(broadcast_my_rank, 4, 2)
        check(run.results == [2.0] * 4, f"all ranks should hold 2.0, they hold {run.results}")

    def broadcast_my_rank(lesson: Any, src: int) -> float:       # on every rank
        x = torch.full((1,), float(dist.get_rank()))
        lesson.broadcast(x, src)
        return float(x)

The body runs in the ranks and returns values; what is asserted about them runs in pytest's process,
where the learner's code is never imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distlab.grade.checks import Wrong, check
    from distlab.grade.outcomes import Outcome
    from distlab.grade.running import Grade, Run
    from distlab.grade.tasks import task

_HOME_OF = {
    "Wrong": "checks",
    "check": "checks",
    "Outcome": "outcomes",
    "Grade": "running",
    "Run": "running",
    "task": "tasks",
}

__all__ = ["Grade", "Outcome", "Run", "Wrong", "check", "task"]


def __getattr__(name: str) -> Any:
    """Load torch only when something that needs it is asked for: ``ahead`` must come first."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
