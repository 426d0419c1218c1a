"""Which test belongs to which task."""

from typing import Any

import pytest


def task(task_id: str, *, real: bool = False) -> Any:
    """Mark a test as one of a task.

    Args:
        task_id: id in course.toml, such as "1.5".
        real: run it in the simulated world and then again on real processes.
    """
    return pytest.mark.task(task_id, real=real)


def task_of(item: pytest.Item) -> str | None:
    """Return the id of the task that a test belongs to."""
    mark = item.get_closest_marker("task")
    return str(mark.args[0]) if mark else None


def is_real_too(mark: pytest.Mark) -> bool:
    """Return whether a marked test runs on real processes as well."""
    return bool(mark.kwargs.get("real"))
