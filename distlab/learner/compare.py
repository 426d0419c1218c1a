"""A learner's functions beside the solution's."""

import difflib

from distlab.course import Task
from distlab.learner import source
from distlab.learner.folder import CourseFolder, LearnerError


def diff(folder: CourseFolder, task: Task) -> str:
    """Return a unified diff of the task's functions, "" if they are the same.

    Raises:
        LearnerError: there is no solution, or the learner's file does not parse.
    """
    own_text = source.read(folder.root / task.template)
    own, solved = (
        source.functions(own_text),
        source.functions(source.read(folder.root / task.solution)),
    )
    if task.function not in solved:
        raise LearnerError(f"{task.solution} has no {task.function} to compare with")
    if not own:
        raise LearnerError(f"{task.template} is missing or does not parse: distlab check {task.id}")
    return "".join(_one(name, own.get(name, ""), solved.get(name, "")) for name in task.functions)


def _one(name: str, own: str, solved: str) -> str:
    lines = difflib.unified_diff(
        own.splitlines(keepends=True),
        solved.splitlines(keepends=True),
        f"yours: {name}",
        f"solution: {name}",
        n=100,
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
