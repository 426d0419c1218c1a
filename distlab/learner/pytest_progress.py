"""A pytest plugin: what pytest says of the templates counts in ``distlab status`` too.

PYTEST_DONT_REWRITE: the learner's commands may have imported this before pytest could.
"""

from typing import Any

import pytest

from distlab.course import PASSED
from distlab.learner import source, state, templates
from distlab.learner.folder import CourseFolder, LearnerError, find

_DIGESTS = pytest.StashKey[dict[str, str]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note what is about to be graded: the learner may save something else meanwhile."""
    folder = _folder(session.config)
    if folder:
        digests = {task.id: source.digest(folder, task) for task in folder.course.tasks}
        session.config.stash[_DIGESTS] = digests


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remember the outcome of every task that was graded; a part of a task has none."""
    folder, digests = _folder(session.config), session.config.stash.get(_DIGESTS, {})
    grader: Any = session.config.pluginmanager.get_plugin("distlab-grader")
    if not folder or grader is None:
        return
    waiting = {task_id for task_id, result in grader.results.items() if result.is_waiting}
    records = {
        task_id: state.Record(result.outcome.value, digests.get(task_id, ""))
        for task_id, result in grader.results.items()
        if result.tests and (result.is_complete or result.outcome.value != PASSED)
    }
    if records:
        templates.keep(folder)
        state.remember(folder, records, waiting)


def _folder(config: pytest.Config) -> CourseFolder | None:
    """Return the course's folder, if it is the learner's files that are graded there."""
    if config.getoption("impl") != "template" or config.option.collectonly:
        return None
    try:
        return find(config.rootpath)
    except LearnerError:
        return None
