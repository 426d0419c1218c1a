"""The lessons that a training run uses: the solutions, or the learner's own."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from distlab import chosen
from distlab.production.config import Config
from distlab.production.stand_ins import STAND_INS
from distlab.util.text import joined

Lessons = Callable[[str], Any]  # imports a lesson by its name


class Service(NamedTuple):
    """A lesson that serves every run, and that has a stand-in until its tasks are written."""

    tasks: Sequence[str]  # ids
    what: str  # that a run lacks with the stand-in


SERVICES = {
    "checkpoint": Service(("4.1", "4.3", "4.4"), "checkpoints"),
    "training_state": Service(("4.2",), "continuing where a run stopped"),
    "fault_tolerance": Service(("4.5", "4.7"), "heartbeats and orderly stops"),
    "monitoring": Service(("4.14", "4.15", "4.16"), "the parts of a step, MFU and stragglers"),
    "exporters": Service(("4.17",), "TensorBoard and Prometheus"),
}

# Ids of the tasks whose functions each choice in a configuration calls.
PATTERNS: dict[str, tuple[str, ...]] = {
    "auto": (),
    "native": (),
    "naive": ("1.6",),
    "recursive_doubling": ("1.7",),
    "ring": ("3.3",),
    "tree": ("3.5",),
    "hierarchical": ("3.7",),
    "shared_memory": (),
    "parameter_server": ("3.16",),
}
GRADIENTS = {"buckets": ("3.11",), "per_parameter": ("1.10",), "flat": ("1.10",)}
STAGES = {0: (), 1: ("3.12",), 2: ("3.13",), 3: ("3.14",)}
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
    """Check that the lessons of a run are written, and return a function that imports them.

    A learner's run needs the lessons that its configuration chooses, such as the ring. A service
    that is not written yet has a stand-in.

    Args:
        impl: "solution" or "mine".

    Raises:
        NotThereError: A task is not written yet; the message names it.
        LearnerError: ``impl`` is "mine" outside the course's folder.
    """
    submitted, missing = chosen.find(impl, tasks_of(config)), unwritten_services(impl)
    return lambda name: STAND_INS[name] if name in missing else chosen.lesson(submitted, name)


def unwritten_services(impl: str) -> list[str]:
    """Return the names of the services that have a stand-in."""
    if impl == "solution":
        return []
    missing = [name for name, service in SERVICES.items() if chosen.unwritten(service.tasks)]
    needs_other = "training_state" in missing and "checkpoint" not in missing
    return [*missing, *(["checkpoint"] if needs_other else [])]


def without(services: Sequence[str]) -> str:
    """Return a line that says what a run lacks without some services; "" if there are none."""
    parts = [f"{SERVICES[s].what} ({', '.join(SERVICES[s].tasks)})" for s in services]
    return f"trains without {joined(parts)} until these tasks are written" if parts else ""


def tasks_of(config: Config) -> tuple[str, ...]:
    """Return the ids of the tasks that a configuration chooses."""
    pipeline = ("2.1", "2.7", "2.8", "2.9", "2.10") if config.parallelism.pp > 1 else ()
    shards = ("2.15",) if config.parallelism.tp > 1 else ()
    pattern: tuple[str, ...] = ()
    if config.strategy == "course":
        pattern = PATTERNS[config.communication_pattern]
        is_averaged = not (config.has_servers or config.zero_redundancy)
        pattern += GRADIENTS[config.gradients] if is_averaged else ()
    stage, compressor = STAGES[config.zero_redundancy], COMPRESSORS[config.compression]
    profiler = ("4.18",) if config.profile else ()
    return *pipeline, *shards, *pattern, *stage, *compressor, *profiler
