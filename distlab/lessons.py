"""The only module that locates lessons: solutions, the phases' given code, and the trainer.

    lessons.solution("ddp")            # solutions/phase3_multi_node/ddp.py
    lessons.given_4.group_device()     # phase4_production/given.py

Lessons are imported only when they are used, because distlab can be installed without the course.
"""

import importlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from distlab import course

COURSE = Path(__file__).parents[1]  # this copy of the course
SOLUTIONS = "solutions"

if TYPE_CHECKING:
    from phase1_data_parallel import given as given_1
    from phase1_data_parallel.given import AllReduceTimes as AllReduceTimes
    from phase2_advanced import given as given_2
    from phase3_multi_node import given as given_3
    from phase4_production import given as given_4
    from phase4_production.given import StepTimes as StepTimes
    from solutions.phase4_production import imagenet_trainer as imagenet_trainer

    __all__ = ["given_1", "given_2", "given_3", "given_4"]
else:

    def __getattr__(name: str) -> ModuleType:
        """Import ``imagenet_trainer`` or a module such as ``given_3`` on first use."""
        kind, _, number = name.partition("_")
        if kind == "given":
            return importlib.import_module(f"{folder(int(number))}.given")
        if name == "imagenet_trainer":
            return importlib.import_module(trainer())
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def trainer() -> str:
    """Return the name of the production trainer's module, for ``python -m``.

    A copy of the course without solutions has it among the given files of Phase 4.
    """
    has_solutions = (COURSE / SOLUTIONS).is_dir()
    return ".".join([*([SOLUTIONS] if has_solutions else []), folder(4), "imagenet_trainer"])


def folder(phase: int) -> str:
    """Return the folder of a phase, which is also its package."""
    return next(listed.folder for listed in _course().phases if listed.number == phase)


def folder_of(lesson: str) -> str:
    """Return the folder of the phase that a lesson belongs to; the lesson must have tasks."""
    return next(task.folder for task in _course().tasks if task.lesson == lesson)


@cache
def _course() -> course.Course:
    return course.load(COURSE)


def solution(lesson: str) -> ModuleType:
    """Import the solution of a lesson such as ``ddp``."""
    return importlib.import_module(f"{SOLUTIONS}.{folder_of(lesson)}.{lesson}")


def solution_at(path: str) -> ModuleType:
    """Import the solution of a lesson such as ``phase1_data_parallel.collectives``."""
    return importlib.import_module(f"{SOLUTIONS}.{path}")


def template_at(path: str) -> ModuleType:
    """Import the learner's file of a lesson such as ``phase1_data_parallel.collectives``."""
    phase, _, lesson = path.rpartition(".")
    return importlib.import_module(f"{phase}.template_{lesson}")
