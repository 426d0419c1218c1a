"""Bodies for task 4.1: saves that crash or are damaged, and what is loaded then."""

import operator
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from judging.calls import returned, typed
from phase4.crash_states import State, build, crash_states, described, states_at_the_end
from phase4.file_history import recorded
from phase4.file_reads import Read, reads_in
from phase4.open_files import open_in
from phase4_production.given import Loaded

MANIFEST = "manifest.json"
MORE = "more.pt"  # file that is in no manifest
LONG_AGO_S = 1_000_000_000  # the year 2001


class Plan(NamedTuple):
    """The folder before a checkpoint is saved.

    Attributes:
        step: Step of the new checkpoint.
        there: Steps of the checkpoints in the folder.
        damaged: Steps of those that are damaged.
        keep: Number of checkpoints that stay.
        is_made: Whether the folder exists.
        leftovers: Names of folders that a crash has left.
        renamed: Steps of undamaged checkpoints that a save had just renamed, to be removed, when it
            was killed: their old names may come back when the power fails.
    """

    step: int
    there: tuple[int, ...] = ()
    damaged: tuple[int, ...] = ()
    keep: int = 3
    is_made: bool = True
    leftovers: tuple[str, ...] = ()
    renamed: tuple[int, ...] = ()


def state_of(step: int) -> dict[str, Any]:
    """Return a state of all kinds; those of two steps need the same number of bytes."""
    weight = torch.arange(60, dtype=torch.float32).view(6, 10) + step
    return {
        "model": {"weight": weight, "bias": weight[0].bfloat16(), "empty": torch.zeros(0)},
        "optimizer": {"state": {0: {"step": torch.tensor(step)}}, "lrs": [0.1, 1e-3 * step]},
        "position": (step, None, True),
        "name": f"run {step:03d}",
    }


@contextmanager
def folder_of(lesson: Any, plan: Plan) -> Iterator[Path]:
    """Make the folder of a plan, in an outer folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer) / "run"
        if plan.is_made:
            folder.mkdir()
        for step in plan.there:
            lesson.save_checkpoint(state_of(step), folder, step, keep=len(plan.there))
        for step in plan.damaged:
            shorten(folder / name_of(step))
        for name in plan.leftovers:
            shutil.copytree(folder / name_of(plan.there[-1]), folder / name)
            shorten(folder / name)
        _age_backwards(folder)
        yield folder


def _age_backwards(folder: Path) -> None:
    """Date the first checkpoint last, as a copy may."""
    for place, checkpoint in enumerate(sorted(folder.glob("step-*"), reverse=True)):
        os.utime(checkpoint, (LONG_AGO_S + place, LONG_AGO_S + place))


def name_of(step: int) -> str:
    """Return the name of a checkpoint."""
    return f"step-{step:08d}"


def shorten(checkpoint: Path) -> None:
    """Damage a checkpoint: its largest file ends a byte too early."""
    largest = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size - 1)


def listing(folder: Path) -> list[str]:
    """Return the names in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def load_from(lesson: Any, folder: Path) -> dict[str, Any]:
    """Load from a folder.

    Returns:
        The step that is loaded (None for none), whether its state is the one that was saved, the
        skipped checkpoints with their reasons, and the error.
    """
    nothing = {"step": None, "equal": False, "skipped": {}, "error": ""}
    try:
        loaded = lesson.load_checkpoint(folder)
    except NotImplementedError:
        raise
    except Exception as error:
        return {**nothing, "error": error_text(error)}
    if loaded is None:
        return nothing
    loaded = typed("load_checkpoint", loaded, Loaded)
    is_there = Path(loaded.path) == folder / name_of(loaded.step)
    return {
        "step": int(loaded.step),
        "equal": same(loaded.state, state_of(loaded.step)) and is_there,
        "skipped": {Path(path).name: str(reason) for path, reason in loaded.skipped.items()},
        "error": "",
    }


def error_text(error: Exception) -> str:
    """Return ``OSError: …``."""
    return f"{type(error).__name__}: {error}"


def same(a: Any, b: Any) -> bool:
    """Return whether two states are equal: types, keys, dtypes and bits."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.device.type == "cpu" and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b)) and type(a) is type(b)
    return bool(type(a) is type(b) and a == b)


# Crashes


def crash(lesson: Any, plan: Plan) -> dict[str, Any]:
    """Save, and load from whatever a crash may leave, during the save and after it.

    Returns:
        The operations of the save, in words; the folder after it; whether the path was right; and
        for each state that a crash may leave, the number of operations before it, the result of a
        load, and the ``step-…`` folders that can and can't be loaded by themselves.
    """
    with folder_of(lesson, plan) as folder:
        with recorded(folder.parent, lesson) as recorder:
            for step in plan.renamed:
                (folder / name_of(step)).rename(folder / f".{name_of(step)}.removed")
            path = lesson.save_checkpoint(state_of(plan.step), folder, plan.step, keep=plan.keep)
        is_right = str(returned("save_checkpoint", path)) == str(folder / name_of(plan.step))
        left = listing(folder)
    end = len(recorder.events)
    states = [(count, False, state) for count, state in crash_states(recorder)]
    states += [(end, True, state) for state in states_at_the_end(recorder)]
    damage_of = cache(partial(_damage_alone, lesson))
    loads = [_after_a_crash(lesson, damage_of, *state) for state in states]
    operations = described(recorder)
    return {"states": loads, "operations": operations, "left": left, "path": is_right}


def _after_a_crash(
    lesson: Any, damage_of: Callable[[str, State], str], count: int, is_end: bool, state: State
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer) / "all" / "run"
        build(state, folder.parent)
        names = [name for name in listing(folder) if name.startswith("step-")]
        damages = {name: damage_of(name, _inside(f"{folder.name}/{name}", state)) for name in names}
        files = {
            path.relative_to(folder.parent).as_posix(): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        return {
            "done": count,
            "is_end": is_end,
            "files": files,
            "broken": [f"{name}: {damage}" for name, damage in damages.items() if damage],
            "intact": [name for name, damage in damages.items() if not damage],
            **load_from(lesson, folder),
        }


def _inside(path: str, state: State) -> State:
    """Return the content of a folder, named from there."""
    below = f"{path}/"
    return tuple((name.removeprefix(below), c) for name, c in state if name.startswith(below))


def _damage_alone(lesson: Any, name: str, content: State) -> str:
    """Return the damage of a checkpoint that is alone in its folder, "" for none."""
    with tempfile.TemporaryDirectory() as outer:
        build(content, Path(outer) / "run" / name)
        loaded = load_from(lesson, Path(outer) / "run")
        return loaded["error"] or ("" if loaded["equal"] else "not what was saved")


# Damage


class Damage(NamedTuple):
    """A damage of the newest of three checkpoints; ``which`` numbers its files."""

    kind: str
    which: int = 0
    place: float = 0.0

    def __str__(self) -> str:
        return self.kind

    @property
    def is_of_two(self) -> bool:
        """Whether the checkpoint before the newest is damaged as well."""
        return self.kind in ("swapped checkpoints", "files swapped between two checkpoints")


def damaged(lesson: Any, damages: Sequence[Damage]) -> list[dict[str, Any]]:
    """Damage the newest checkpoint of three in each of the ways, and load.

    The oldest is damaged too, unless it is the one to be loaded: a load need not notice that.
    """
    loads = []
    for damage in damages:
        plan = Plan(0, there=(1, 2, 3), damaged=() if damage.is_of_two else (1,))
        with folder_of(lesson, plan) as folder:
            files = [*listing(folder / name_of(3)), MORE]
            file = _damage(folder, damage)
            with reads_in(folder) as reads:
                loaded = load_from(lesson, folder)
            times = times_read(reads)
            loads.append({"file": file, "files": files, "read": times, **loaded})
    return loads


def times_read(reads: Sequence[Read]) -> dict[str, int]:
    """Return how often a file of each ``step-…`` was read, at most; manifests don't count."""
    times = Counter(read.path for read in reads if read.path.name != MANIFEST)
    names = sorted({path.parts[0] for path in times if path.parts[0].startswith("step-")})
    return {name: max(n for path, n in times.items() if path.parts[0] == name) for name in names}


def names_a_file(reason: str, files: Sequence[str], damaged_file: str) -> bool:
    """Return whether a reason names the damaged file, or any of ``files`` where it may be another.

    A damaged manifest no longer fits a file that is as it was. If a bit of it has flipped, it may
    list a ``ctate.pt``, which is missing.
    """
    differences = 1 if damaged_file == MANIFEST else 0
    to_blame = files if damaged_file in ("", MANIFEST) else [Path(damaged_file).name]
    return any(
        sum(map(operator.ne, reason[start : start + len(name)], name)) <= differences
        for name in to_blame
        for start in range(len(reason) - len(name) + 1)
    )


def _damage(folder: Path, damage: Damage) -> str:
    """Damage it; return the name of the file, relative to the checkpoint."""
    newest, before = folder / name_of(3), folder / name_of(2)
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    file = files[damage.which % len(files)]
    place = int(damage.place * file.stat().st_size)
    if damage.kind == "swapped checkpoints":
        newest.rename(folder / "other")
        before.rename(newest)
        (folder / "other").rename(before)
        return ""
    DAMAGES[damage.kind](file, before / file.relative_to(newest), place)
    return "" if damage.kind == "a file more" else file.relative_to(newest).as_posix()


def _flip(file: Path, _: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << place % 8
    file.write_bytes(content)


def _swap(file: Path, other: Path, _: int) -> None:
    mine, others = file.read_bytes(), other.read_bytes()
    file.write_bytes(others)
    other.write_bytes(mine)


DAMAGES: dict[str, Callable[[Path, Path, int], Any]] = {
    "a flipped bit": _flip,
    "a file that ends too early": lambda file, _, place: os.truncate(file, place),
    "a byte too many": lambda file, _, place: file.write_bytes(file.read_bytes() + b" "),
    "an empty file": lambda file, _, place: os.truncate(file, 0),
    "a missing file": lambda file, _, place: file.unlink(),
    "a file more": lambda file, _, place: (file.parent / MORE).write_bytes(b"more"),
    "files swapped between two checkpoints": _swap,
}


def all_damaged(lesson: Any) -> dict[str, Any]:
    """Load where no checkpoint is left undamaged, and where there is none at all."""
    with folder_of(lesson, Plan(0, there=(1, 2), damaged=(1, 2))) as folder:
        before = listing(folder)
        all_bad = load_from(lesson, folder)
        is_unchanged = before == listing(folder)
    with folder_of(lesson, Plan(0)) as folder:
        empty, missing = load_from(lesson, folder), load_from(lesson, folder / "not there")
    loads = {"an empty folder": empty, "no folder": missing}
    return {"all": all_bad, "unchanged": is_unchanged, "nothing": loads}


# Saves one after the other


def save_all(lesson: Any, steps: Sequence[int], plan: Plan) -> dict[str, Any]:
    """Save some steps after those of a plan; return the folder after each, and what is loaded."""
    with folder_of(lesson, plan) as folder:
        left, read = [], list[dict[str, int]]()
        for step in steps:
            state = state_of(step)
            with reads_in(folder) as reads:
                lesson.save_checkpoint(state, folder, step, keep=plan.keep)
            left.append(listing(folder))
            read.append(times_read(reads))
        is_unchanged = same(state, state_of(step))
        found = {"left": left, "unchanged": is_unchanged, "read": read}
        return {**found, **load_from(lesson, folder)}


def save_again(lesson: Any) -> dict[str, Any]:
    """Save a step that has a checkpoint; return the error, the folder and what is loaded."""
    with folder_of(lesson, Plan(0, there=(1, 2))) as folder:
        refusal = ""
        try:
            lesson.save_checkpoint({"other": 1}, folder, 2)
        except Exception as error:
            refusal = error_text(error)
        return {"refusal": refusal, "left": listing(folder), **load_from(lesson, folder)}


def left_open(lesson: Any) -> list[str]:
    """Save twice and load; return the files of the run that are still open."""
    with folder_of(lesson, Plan(0, there=(1, 2))) as folder:
        lesson.load_checkpoint(folder)
        return open_in(folder.parent)


class _Runs:
    """Runs code when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def load_code(lesson: Any) -> bool:
    """Load a checkpoint that would run code if it were unpickled; return whether it did."""
    with folder_of(lesson, Plan(0)) as folder:
        trap = folder.parent / "trap"
        with suppress(Exception):
            lesson.save_checkpoint({"model": _Runs(str(trap))}, folder, 1)
            lesson.load_checkpoint(folder)
        return trap.exists()


def damages(random: Random, count: int) -> list[Damage]:
    """Draw ways to damage a checkpoint: each kind on each file, and flips at random places."""
    kinds = [Damage(kind, which, random.random()) for kind in DAMAGES for which in (0, 1)]
    flips = [Damage("a flipped bit", which % 3, random.random()) for which in range(count)]
    return [*kinds, *flips, Damage("swapped checkpoints")]
