"""A trace of a few steps, and how much of a step is communication that nothing hides."""

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
    """Write a trace for Perfetto of some steps, which do not count; all ranks call it.

    Args:
        step: does one step.
        folder: Folder of the traces, one for each rank.
        unchanged: keeps the state of the training.
    """
    lesson = lessons("profiling")
    with unchanged():
        trace = lesson.profile_steps(lambda _number: step(), folder)
    found = lesson.exposed_communication(trace)
    say(
        f"{trace}: a step takes {seconds_text(found.step_s)}, of which communication that nothing "
        f"hides takes {seconds_text(found.exposed_s)}"
    )
