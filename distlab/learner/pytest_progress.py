"""A pytest plugin that records the verdicts on the templates for ``distlab status``.

PYTEST_DONT_REWRITE: the learner's commands may import this before pytest can rewrite it.
"""

from typing import Any

import pytest

from distlab.learner import source, state, templates
from distlab.learner.folder import CourseFolder, LearnerError, find

_DIGESTS = pytest.StashKey[dict[str, str]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record the digests before any test runs, because the learner may save a file meanwhile."""
    folder = _folder(session.config)
    if folder:
        digests = {task.id: source.digest(folder, task) for task in folder.course.tasks}
        session.config.stash[_DIGESTS] = digests


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Record the outcome of every graded task."""
    folder, digests = _folder(session.config), session.config.stash.get(_DIGESTS, {})
    grader: Any = session.config.pluginmanager.get_plugin("distlab-grader")
    if not folder or grader is None:
        return
    if any(result.tests for result in grader.results.values()):
        templates.keep(folder)
        state.remember_results(folder, grader.results.values(), digests)


def _folder(config: pytest.Config) -> CourseFolder | None:
    """Return the course's folder if the learner's files in it are graded."""
    if config.getoption("impl") != "template" or config.option.collectonly:
        return None
    try:
        return find(config.rootpath)
    except LearnerError:
        return None
