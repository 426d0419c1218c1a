"""The three hints of a task, from its phase's guidelines.md."""

import re
from dataclasses import dataclass
from pathlib import Path

from distlab.course import HINTS, Task
from distlab.learner.folder import CourseFolder, LearnerError
from distlab.learner.state import Progress

_HINT = re.compile(r"<details><summary>(.+?)</summary>\n(.*?)</details>", re.DOTALL)


@dataclass(frozen=True)
class Hint:
    """One hint: its title, such as "Hint 2: the idea", and its text in Markdown."""

    level: int
    title: str
    text: str
    is_repeated: bool = False  # True if all hints have been shown before


def hints(folder: CourseFolder, task: Task) -> list[Hint]:
    """Return all hints of a task.

    Raises:
        LearnerError: guidelines.md does not contain the hints.
    """
    guide = folder.guide(task)
    _, _, rest = _read(guide).partition(f"\n## {task.heading}\n")
    texts = _HINT.findall(rest.partition("\n## ")[0])
    if len(texts) != len(HINTS):
        raise LearnerError(f"{guide} has no section '## {task.heading}' with {len(HINTS)} hints")
    return [
        Hint(level, title.strip(), text.strip())
        for level, (title, text) in zip(HINTS, texts, strict=True)
    ]


def _read(guide: Path) -> str:
    try:
        return guide.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def take(folder: CourseFolder, task: Task, progress: Progress, level: int | None = None) -> Hint:
    """Return the next hint, or the one at ``level``, and record that it was shown."""
    if level is not None and level not in HINTS:
        raise LearnerError(f"--level {level}: a task has hints {HINTS[0]} to {HINTS[-1]}")
    has_all = level is None and progress.hints.get(task.id) == HINTS[-1]
    following = min(progress.hints.get(task.id, 0) + 1, HINTS[-1])
    hint = hints(folder, task)[(level or following) - HINTS[0]]
    progress.hints[task.id] = max(hint.level, progress.hints.get(task.id, 0))
    progress.save()
    return Hint(hint.level, hint.title, hint.text, is_repeated=has_all)


def footer(hint: Hint, task: Task) -> str:
    """Return a line that says how to continue after a hint."""
    if hint.is_repeated:
        return f"That was the last hint. Read on in {task.folder}/{task.guide}"
    if hint.level == HINTS[-1]:
        return f"No more hints. Read on in {task.folder}/{task.guide}"
    return f"The next one: distlab hint {task.id}"
