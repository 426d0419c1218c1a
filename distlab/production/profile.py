"""Trace a few steps, and report how much communication is not hidden by computation."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from distlab.production.lessons import Lessons
from distlab.production.saving import say
from distlab.util.text import seconds_text


def profile(
    step: Callable[[], object],
    folder: Path,
    unchanged: Callable[[], AbstractContextManager[None]],
    lessons: Lessons,
) -> None:
    """Write a Perfetto trace of a few steps, and undo the steps; called on all ranks.

    Args:
        step: Function that takes one step.
        folder: Folder of the traces, one for each rank.
        unchanged: Context that restores the training state at its end.
    """
    lesson = lessons("profiling")
    with unchanged():
        trace = lesson.profile_steps(lambda _number: step(), folder)
    costs = lesson.exposed_communication(trace)
    say(
        f"{trace}: a step takes {seconds_text(costs.step_s)}, of which communication that nothing "
        f"hides takes {seconds_text(costs.exposed_s)}"
    )
