"""Leave out phases that a school has added: the course's rules of form do not apply to them."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

from distlab.course import FILE, Course

FIRST_OWN = 9
_HEAD = re.compile(r"^\[\[phase\]\]\nnumber = (9|\d\d+)$", re.MULTILINE)


def shipped(course: Course) -> Course:
    """Return the course without a school's own phases, which are those from number 9 on."""
    phases = tuple(phase for phase in course.phases if phase.number < FIRST_OWN)
    return replace(course, phases=phases)


def copy_shipped(root: Path, target: Path) -> None:
    """Copy course.toml into a folder, without a school's own phases, which come last."""
    shutil.copy(root / FILE, target)
    text = (target / FILE).read_text(encoding="utf-8")
    (target / FILE).write_text(_HEAD.split(text)[0], encoding="utf-8")


def copy_first_phases(root: Path, target: Path, count: int = 1) -> None:
    """Copy course.toml into a folder, with only the first ``count`` phases."""
    tables = (root / FILE).read_text(encoding="utf-8").split("[[phase]]\n")
    (target / FILE).write_text("[[phase]]\n".join(tables[: 1 + count]), encoding="utf-8")
