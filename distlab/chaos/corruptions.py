"""Damage checkpoints at random, and check that the damage is noticed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from distlab import chosen
from distlab.chaos.bits import digest
from distlab.grade.submission import Submission

NEWEST, BEFORE, OLDEST = 3, 2, 1


class Corruptions(NamedTuple):
    """The results of a campaign."""

    by_kind: dict[str, int]
    failures: list[str]


class _Damaged(NamedTuple):
    """The damage to the newest of three checkpoints, and the step that must be loaded instead."""

    what: str
    expected: int = BEFORE


def run(lessons: Submission, count: int, seed: str, scratch: Path) -> Corruptions:
    """Damage the newest of three checkpoints ``count`` times, and check each time which is loaded.

    The damage must be noticed, with a reason, and the previous checkpoint must be loaded, bit for
    bit as it was saved. If two checkpoints were damaged, the oldest must be loaded.

    Args:
        lessons: Submission with ``save_checkpoint`` and ``load_checkpoint``.
        count: Number of corruptions.
        seed: Seed for the choice of corruptions.
        scratch: Folder that does not exist yet.
    """
    lesson: Any = chosen.lesson(lessons, "checkpoint")
    random, whole, damaged = Random(seed), scratch / "whole", scratch / "damaged"
    scratch.mkdir()
    for step in (OLDEST, BEFORE, NEWEST):
        lesson.save_checkpoint(_state_of(step), whole, step)
    results = Corruptions({}, [])
    for _ in range(count):
        shutil.copytree(whole, damaged)
        kind = random.choice(list(KINDS))
        damage = KINDS[kind](random, damaged)
        if failure := _failure(lesson, damaged, damage):
            results.failures.append(f"{kind}: {damage.what}: {failure}")
        results.by_kind[kind] = results.by_kind.get(kind, 0) + 1
        shutil.rmtree(damaged)
    return results


def _state_of(step: int) -> dict[str, Any]:
    """Return the state after a step; the states of all steps have the same size."""
    values = torch.arange(2000, dtype=torch.float32) * step
    return {"weight": values.view(40, 50), "moments": [values[:40] / 7, step], "step": step}


def _failure(lesson: Any, folder: Path, damage: _Damaged) -> str:
    """Load a checkpoint; return what is wrong with the result, or ""."""
    try:
        loaded = lesson.load_checkpoint(folder)
    except Exception as error:
        return f"load_checkpoint raises {type(error).__name__}: {error}"
    if loaded is None:
        return "load_checkpoint finds nothing"
    if loaded.step != damage.expected:
        return f"step {loaded.step} is loaded instead of step {damage.expected}"
    if digest(loaded.state) != digest(_state_of(loaded.step)):
        return f"step {loaded.step} is not as it was saved"
    unnamed = NEWEST - loaded.step - sum(bool(reason) for reason in loaded.skipped.values())
    return f"{unnamed} of the damaged ones have no reason in skipped" if unnamed else ""


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _any_file(random: Random, folder: Path, step: int = NEWEST) -> Path:
    return random.choice(sorted(_checkpoint(folder, step).iterdir()))


def _flip(random: Random, folder: Path) -> _Damaged:
    path = _any_file(random, folder)
    content = bytearray(path.read_bytes())
    place = random.randrange(len(content))
    content[place] ^= 1 << random.randrange(8)
    path.write_bytes(content)
    return _Damaged(f"byte {place} of {path.name}")


def _truncate(random: Random, folder: Path) -> _Damaged:
    path = _any_file(random, folder)
    size = random.randrange(path.stat().st_size)
    os.truncate(path, size)
    return _Damaged(f"{path.name} ends after {size} bytes")


def _remove(random: Random, folder: Path) -> _Damaged:
    path = _any_file(random, folder)
    path.unlink()
    return _Damaged(f"{path.name} is missing")


def _zero(random: Random, folder: Path) -> _Damaged:
    """Zero part of a file, as a disk does when it loses a block."""
    path = _any_file(random, folder)
    content = bytearray(path.read_bytes())
    first = random.randrange(len(content))
    while not any(content[first : first + 512]):
        first = random.randrange(len(content))
    length = len(content[first : first + 512])
    content[first : first + 512] = bytes(length)
    path.write_bytes(content)
    return _Damaged(f"{length} bytes of {path.name} are zero from byte {first} on")


def _swap(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def _swap_files(random: Random, folder: Path) -> _Damaged:
    one, other = random.sample(sorted(_checkpoint(folder, NEWEST).iterdir()), 2)
    _swap(one, other)
    return _Damaged(f"{one.name} and {other.name} are swapped")


def _swap_steps(random: Random, folder: Path) -> _Damaged:
    path = _any_file(random, folder)
    _swap(path, _checkpoint(folder, BEFORE) / path.name)
    return _Damaged(f"{path.name} is that of the step before, and the other way round", OLDEST)


def _copy_older(random: Random, folder: Path) -> _Damaged:
    path = _any_file(random, folder)
    shutil.copyfile(_checkpoint(folder, BEFORE) / path.name, path)
    return _Damaged(f"{path.name} is that of the step before")


KINDS: dict[str, Callable[[Random, Path], _Damaged]] = {
    "a flipped bit": _flip,
    "a file cut off": _truncate,
    "a missing file": _remove,
    "a lost block": _zero,
    "files swapped": _swap_files,
    "files swapped between steps": _swap_steps,
    "a file of an older step": _copy_older,
}
