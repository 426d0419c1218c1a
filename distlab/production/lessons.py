"""The lessons that a training run uses: the solutions, or the learner's own."""

from collections.abc import Callable
from functools import partial
from types import ModuleType

from distlab import chosen
from distlab.production.config import Config

Lessons = Callable[[str], ModuleType]  # imports a lesson by its name

# Ids of the tasks whose functions each part of a training run calls.
ALWAYS = ("4.1", "4.2", "4.4", "4.5", "4.7", "4.14", "4.15", "4.16", "4.17")
PATTERNS: dict[str, tuple[str, ...]] = {
    "native": (),
    "naive": ("1.6",),
    "recursive_doubling": ("1.7",),
    "ring": ("3.4",),
    "tree": ("3.6",),
    "hierarchical": ("3.8",),
    "shared_memory": (),
    "parameter_server": ("3.14",),
}
GRADIENTS = {"buckets": ("3.12",), "per_parameter": ("1.10",), "flat": ("1.10",)}
STAGES = {0: (), 1: ("3.18",), 2: ("3.19",), 3: ("3.20",)}
COMPRESSORS: dict[str, tuple[str, ...]] = {
    "none": (),
    "top_k": ("4.9", "4.13"),
    "random_k": ("4.10", "4.13"),
    "threshold": ("4.10", "4.13"),
    "int8": ("4.11", "4.13"),
    "sign": ("4.11", "4.13"),
    "power_sgd": ("4.12", "4.13"),
}


def find_lessons(impl: str, config: Config) -> Lessons:
    """Check that all lessons of a run are written, and return a function that imports them.

    Args:
        impl: "solution" or "mine".

    Raises:
        NotThereError: A task is not written yet; the message names it.
        LearnerError: ``impl`` is "mine" outside the course's folder.
    """
    return partial(chosen.lesson, chosen.find(impl, tasks_of(config)))


def tasks_of(config: Config) -> tuple[str, ...]:
    """Return the ids of the tasks whose functions a training run calls."""
    pipeline = ("2.1", "2.8", "2.9", "2.11", "2.12") if config.parallelism.pp > 1 else ()
    shards = ("2.17",) if config.parallelism.tp > 1 else ()
    pattern: tuple[str, ...] = ()
    if config.strategy == "course":
        pattern = PATTERNS[config.communication_pattern]
        pattern += () if config.has_servers else GRADIENTS[config.gradients]
    stage, compressor = STAGES[config.zero_redundancy], COMPRESSORS[config.compression]
    profiler = ("4.18",) if config.profile else ()
    return (*ALWAYS, *pipeline, *shards, *pattern, *stage, *compressor, *profiler)
