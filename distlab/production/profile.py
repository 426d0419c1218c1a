"""A trace of a few steps, and the communication of a step that no computation hides."""

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
    """Write a trace of a few steps, which do not count, for Perfetto; called on all ranks.

    Args:
        step: Function that does one step.
        folder: Folder of the traces, one for each rank.
        unchanged: Context that restores the state of the training at its end.
    """
    lesson = lessons("profiling")
    with unchanged():
        trace = lesson.profile_steps(lambda _number: step(), folder)
    costs = lesson.exposed_communication(trace)
    say(
        f"{trace}: a step takes {seconds_text(costs.step_s)}, of which communication that nothing "
        f"hides takes {seconds_text(costs.exposed_s)}"
    )
