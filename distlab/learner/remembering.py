"""A pytest plugin: what pytest says of the templates counts in ``distlab status`` too.

PYTEST_DONT_REWRITE: the learner's commands may have imported this before pytest could.
"""

from typing import Any

import pytest

from distlab.course import PASSED
from distlab.learner import source, state
from distlab.learner.folder import LearnerError, find


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remember the outcome of every task that was graded; a part of a task has none."""
    config = session.config
    grader: Any = config.pluginmanager.get_plugin("distlab-grader")
    if grader is None or config.getoption("impl") != "template" or config.option.collectonly:
        return
    outcomes = {
        task_id: result.outcome.value
        for task_id, result in grader.results.items()
        if result.tests and (result.is_complete or result.outcome.value != PASSED)
    }
    try:
        folder = find(config.rootpath)
        tasks = [task for task in folder.course.tasks if task.id in outcomes]
        records = {t.id: state.Record(outcomes[t.id], source.digest(folder, t)) for t in tasks}
        if records:
            source.keep_templates(folder)
            state.remember(folder, records)
    except (LearnerError, OSError):
        return  # it is only there to say where to go on
