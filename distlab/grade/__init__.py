"""The grader: a pytest plugin that judges a learner's functions by their defining properties.

    @task("1.4")
    def test_every_rank_gets_what_src_has(grade: Grade) -> None:
        run = grade.run(broadcast_my_rank, 4, 2)
        check(run.results == [2.0] * 4, f"all ranks should hold 2.0, they hold {run.results}")
        check_cost(max(run.messages) <= 2, f"2 messages are enough; by rank, {run.messages}")

    def broadcast_my_rank(lesson: Any, src: int) -> float:       # on every rank
        x = torch.full((1,), float(dist.get_rank()))
        lesson.broadcast(x, src)
        return float(x)

The body runs on the ranks and returns values. The checks of these values run in pytest's process,
where the learner's code is never imported.

    suite        the tests of one phase, in tests/test_phaseN.py
    submission   the folder whose files are graded: the templates, the solutions, or another folder
    lesson       one of the submission's files, as a body sees it
    body         a test's function that runs on every rank
    run          the results of a world, with its messages and costs if the world counts them
    outcome      how a test or task ended: passed, failed, todo, hang, crash and so on
    verdict      an outcome with the message for the learner
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distlab.grade.checks import Wrong, WrongResult, check, check_cost
    from distlab.grade.outcomes import Outcome
    from distlab.grade.running import Grade, Run
    from distlab.grade.suites import task

_MODULES = ("checks", "suites", "outcomes", "running")  # in order of import time, fastest first

__all__ = ["Grade", "Outcome", "Run", "Wrong", "WrongResult", "check", "check_cost", "task"]


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that ``prestart`` can run before torch is imported."""
    for module_name in _MODULES if name in __all__ else ():
        module = importlib.import_module(f"{__name__}.{module_name}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
