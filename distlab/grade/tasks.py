"""The mark that assigns a test to a task."""

from typing import Any

import pytest


def task(task_id: str, *, real: bool = False) -> Any:
    """Mark a test as one of a task.

    Args:
        task_id: Id in course.toml, such as "1.5".
        real: True to run the test in the simulated world, then on real processes.
    """
    return pytest.mark.task(task_id, real=real)


def task_of(item: pytest.Item) -> str | None:
    """Return the id of the task that a test belongs to."""
    mark = item.get_closest_marker("task")
    return str(mark.args[0]) if mark else None


def is_real_too(mark: pytest.Mark) -> bool:
    """Return True if a marked test also runs on real processes."""
    return bool(mark.kwargs.get("real"))
