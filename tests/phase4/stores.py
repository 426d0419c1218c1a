"""Bodies for tasks 4.1 and 4.3: saves that crash, damaged checkpoints, and loads after both."""

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch.distributed as dist

from distlab.sim import SimulationError
from phase4.file_history import (
    RETURNED,
    Disk,
    Read,
    State,
    Tree,
    build,
    crash_states,
    kill_states,
    open_in,
    reads_in,
    recorded,
)
from phase4_production.given import Group

MANIFEST = "manifest.json"
MORE = "rank-00007.bin"  # a file that no manifest lists, as left by a killed save on more ranks
LONG_AGO_S = 1_000_000_000  # a time in the year 2001
KINDS = FileExistsError, OSError, RuntimeError, ValueError
Facts = dict[str, Any]


class Plan(NamedTuple):
    """A save, and the state of the folder before it."""

    step: int  # step of the new checkpoint
    there: tuple[int, ...] = ()  # steps of the checkpoints in the folder
    damaged: tuple[int, ...] = ()  # steps of the damaged ones
    keep: int = 3  # number of checkpoints to keep
    is_made: bool = True  # whether the folder exists
    leftovers: tuple[str, ...] = ()  # names of folders left by a crash
    # Steps of undamaged checkpoints that a save had just renamed for removal when it was killed:
    # their old names may come back when the power fails.
    renamed: tuple[int, ...] = ()


def name_of(step: int) -> str:
    """Return the name of a checkpoint."""
    return f"step-{step:08d}"


def listing(folder: Path) -> list[str]:
    """Return the names in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def shorten(checkpoint: Path) -> None:
    """Damage a checkpoint by cutting the last byte off its largest file."""
    largest = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size - 1)


def _lose_manifest(checkpoint: Path) -> None:
    """Damage a checkpoint by removing its manifest."""
    (checkpoint / MANIFEST).unlink()


def _flip_bits(checkpoint: Path) -> None:
    """Damage the last byte of a checkpoint's largest file."""
    largest = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[:-1] + bytes([content[-1] ^ 255]))


HARMS = shorten, _lose_manifest, _flip_bits  # of the first, second and third damaged checkpoint


def error_text(error: Exception) -> str:
    """Return an error as text, with the name of a known class to which it belongs."""
    known = next((kind for kind in KINDS if isinstance(error, kind)), type(error))
    return f"{known.__name__}: {error}"


class Store:
    """A run's folder, the same on all ranks, and this rank's calls of the lesson."""

    loads = ""  # function of the lesson that loads

    def __init__(self, lesson: Any, root: str, group: Group = None) -> None:
        made = [tempfile.mkdtemp(dir=root)] if dist.get_rank(group) == 0 else [""]
        dist.broadcast_object_list(made, group=group, group_src=0)
        self.lesson, self.rank, self.group = lesson, dist.get_rank(group), group
        self.folder = Path(made[0]) / "run"  # the only entry in its parent folder
        self.is_unchanged = True  # False once a save has changed its argument

    def save(self, step: int, *, keep: int = 9) -> Path:
        """Save a step; return the path that the lesson returned."""
        raise NotImplementedError

    def _load(self, folder: Path, alone: Group) -> tuple[Any, bool] | None:
        """Return what the lesson loaded, and whether it equals what was saved."""
        raise NotImplementedError

    def load(self, folder: Path | None = None, *, alone: Group = None) -> Facts:
        """Load from a folder, by default the run's.

        Args:
            folder: The folder of the checkpoints.
            alone: A group with only this rank, if no other rank loads.

        Returns:
            The step that was loaded, or None; whether its state is right; its path if that is
            wrong; the skipped checkpoints with their reasons; and the error.
        """
        folder = folder or self.folder
        facts: Facts = {"step": None, "equal": False, "path": "", "skipped": {}, "error": ""}
        facts["function"] = self.loads
        try:
            result = self._load(folder, alone)
        except Exception as error:
            if isinstance(error, NotImplementedError | SimulationError):
                raise
            return {**facts, "error": error_text(error)}
        if result is None:
            return facts
        loaded, is_equal = result
        # The ranks may see the folder by different names; the path on rank 0 is right on all.
        is_there = Path(loaded.path).resolve() == (folder / name_of(loaded.step)).resolve()
        path = "" if is_there else str(loaded.path)
        skipped = {Path(path).name: str(reason) for path, reason in loaded.skipped.items()}
        step = int(loaded.step)
        return {**facts, "step": step, "equal": is_equal, "path": path, "skipped": skipped}

    def on_rank_0(self, do: Callable[[], Any]) -> Any:
        """Do something on rank 0 while the others wait; return its result on all ranks."""
        dist.barrier(self.group)
        results = [do() if self.rank == 0 else None]
        dist.broadcast_object_list(results, group=self.group, group_src=0)
        return results[0]

    def prepare(self, plan: Plan) -> "Store":
        """Make the folder that a plan describes."""
        if plan.is_made:
            self.on_rank_0(partial(self.folder.mkdir, exist_ok=True))
        for step in plan.there:
            self.save(step)
        self.on_rank_0(lambda: self._damage(plan))
        return self

    def _damage(self, plan: Plan) -> None:
        for harm, step in zip(cycle(HARMS), plan.damaged, strict=False):
            harm(self.folder / name_of(step))
        for name in plan.leftovers:
            shutil.copytree(self.folder / name_of(plan.there[-1]), self.folder / name)
            shorten(self.folder / name)
            (self.folder / name / MORE).write_bytes(b"old")
        # Give the first checkpoint the latest date, as copying might.
        for place, checkpoint in enumerate(sorted(self.folder.glob("step-*"), reverse=True)):
            os.utime(checkpoint, (LONG_AGO_S + place, LONG_AGO_S + place))


# Crashes


def crash(store: Store, plan: Plan, is_killed: bool = False) -> Facts:
    """Save, and load from every state that a crash may leave, during the save and after it.

    Rank 0's disk is slow, so that the other ranks get as far ahead as they can.

    Args:
        is_killed: True if only the process dies, so that all that it has done stays done.

    Returns:
        The operations of the save, in words; the folder after it; whether the path was right; and
        facts about each state that a crash may leave. These are the number of operations before it,
        whether the save had returned on a rank, the result of a load, and the ``step-…`` folders,
        separated into those with the content of an undamaged checkpoint and all others.
    """
    store.prepare(plan)
    alone, recording = dist.new_group([0]), nullcontext()
    if store.rank == 0:  # all ranks are in one process, so this watches all of them
        recording = recorded(store.folder.parent, store.lesson, before_sync=_sleep_on_rank_0)
    with recording as recorder:
        for step in plan.renamed:
            renamed = store.folder / f".{name_of(step)}.removed"
            store.on_rank_0(partial((store.folder / name_of(step)).rename, renamed))
        dist.barrier()
        path = store.save(plan.step, keep=plan.keep)
        sys.audit(RETURNED)
        dist.barrier()
    if store.rank > 0:
        return {}
    is_right = str(path) == str(store.folder / name_of(plan.step))
    undamaged = [step for step in plan.there if step not in plan.damaged]
    intact = _contents(recorder.start, undamaged) | _contents(recorder.seen, [plan.step])
    states = kill_states(recorder) if is_killed else crash_states(recorder, min(recorder.returns))
    loads = [_after_a_crash(store, alone, intact, *state) for state in states]
    operations = [event.text for event in recorder.events]
    facts = {"operations": operations, "left": listing(store.folder)}
    return {**facts, "states": loads, "path": is_right}


def _sleep_on_rank_0() -> None:
    """Sleep for a simulated second on rank 0, while the other ranks continue."""
    if dist.get_rank() == 0:
        time.sleep(1)


def _contents(tree: Tree, steps: Sequence[int]) -> set[State]:
    """Return the content of each checkpoint."""
    (state,) = Disk(tree).states()
    return {_inside(name_of(step), state) for step in steps}


def _inside(name: str, state: State) -> State:
    """Return the part of a state inside a checkpoint."""
    return tuple((path, c) for path, c in state if path.startswith(f"run/{name}/"))


def _after_a_crash(
    store: Store, alone: Group, intact: set[State], count: int, is_end: bool, state: State
) -> Facts:
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer) / "all" / "run"
        build(state, folder.parent)
        names = [name for name in listing(folder) if name.startswith("step-")]
        is_intact = {name: _inside(name, state) in intact for name in names}
        return {
            "done": count,
            "is_end": is_end,
            "files": {path: len(content) for path, content in state if content is not None},
            "broken": [name for name in names if not is_intact[name]],
            "intact": [name for name in names if is_intact[name]],
            **store.load(folder, alone=alone),
        }


# Damage


class Damage(NamedTuple):
    """A kind of damage to the newest of three checkpoints; ``which`` selects the file."""

    kind: str
    which: int = 0
    place: float = 0.5

    def __str__(self) -> str:
        return self.kind

    @property
    def is_of_two(self) -> bool:
        """Whether the checkpoint before the newest is damaged as well."""
        return self.kind in ("swapped checkpoints", "files swapped between two checkpoints")


def damaged(store: Store, damages: Sequence[Damage]) -> list[Facts]:
    """Damage the newest of three checkpoints in one way at a time, and load after each.

    The oldest checkpoint is damaged too, unless it is the one to load. A load need not notice that.
    """
    store.prepare(Plan(0, there=(1, 2, 3)))
    whole, loads = store.folder.with_name("whole"), list[Facts]()
    store.on_rank_0(lambda: shutil.copytree(store.folder, whole))
    files = store.on_rank_0(lambda: [*listing(store.folder / name_of(3)), MORE])
    for damage in damages:
        file = store.on_rank_0(partial(_damage_copy, whole, store.folder, damage))
        with reads_in(store.folder) as reads:
            loaded = store.load()
        loads.append({"file": file, "files": files, "read": times_read(reads), **loaded})
    return loads


def times_read(reads: Sequence[Read]) -> dict[str, int]:
    """Return, for each ``step-…`` folder, the reads of its most-read file other than manifests."""
    times = Counter(read.path for read in reads if read.path.name != MANIFEST)
    names = sorted({path.parts[0] for path in times if path.parts[0].startswith("step-")})
    return {name: max(n for path, n in times.items() if path.parts[0] == name) for name in names}


def names_a_file(reason: str, files: Sequence[str], damaged_file: str) -> bool:
    """Return whether a reason names the damaged file or, if any may be blamed, one of ``files``.

    If the manifest is damaged, intact files no longer match it, so that any of them may be named.
    """
    to_blame = files if damaged_file in ("", MANIFEST) else [Path(damaged_file).name]
    return any(name in reason for name in to_blame)


def _damage_copy(whole: Path, folder: Path, damage: Damage) -> str:
    """Damage a fresh copy of the whole folder; return the name of the damaged file."""
    shutil.rmtree(folder)
    shutil.copytree(whole, folder)
    newest, before = folder / name_of(3), folder / name_of(2)
    if not damage.is_of_two:
        shorten(folder / name_of(1))
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    file = files[damage.which % len(files)]
    if damage.kind == "swapped checkpoints":
        newest.rename(folder / "other")
        before.rename(newest)
        (folder / "other").rename(before)
        return ""
    place = int(damage.place * file.stat().st_size)
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
    "a missing file": lambda file, _, place: file.unlink(),
    "an empty file": lambda file, _, place: os.truncate(file, 0),
    "a file more": lambda file, _, place: (file.parent / MORE).write_bytes(b"more"),
    "files swapped between two checkpoints": _swap,
}


def draw_damages(random: Random, num_flips: int) -> list[Damage]:
    """Draw ways to damage a checkpoint: each kind on two files, and bits flipped at random."""
    kinds = [Damage(kind, which, random.random()) for kind in DAMAGES for which in (0, 1)]
    flips = [Damage("a flipped bit", which % 3, random.random()) for which in range(num_flips)]
    return [*kinds, *flips, Damage("swapped checkpoints")]


def load_where_all_are_damaged(store: Store) -> Facts:
    """Load from an empty or missing folder, and from one whose checkpoints are all damaged."""
    empty = store.prepare(Plan(0)).load()
    missing = store.load(store.folder / "not there")
    store.prepare(Plan(0, there=(1, 2), damaged=(1, 2)))
    before = sorted(store.folder.rglob("*"))
    files = listing(store.folder / name_of(2))
    load = store.load()
    is_unchanged = before == sorted(store.folder.rglob("*"))
    nothing = {"an empty folder": empty, "no folder": missing}
    return {"all": load, "files": files, "unchanged": is_unchanged, "nothing": nothing}


# Series of saves


def save_all(store: Store, steps: Sequence[int], plan: Plan) -> Facts:
    """Prepare a plan's folder and save steps; return the folder after each, and a final load."""
    store.prepare(plan)
    left, read = [], list[Mapping[str, int]]()
    for step in steps:
        with reads_in(store.folder) as reads:
            store.save(step, keep=plan.keep)
        left.append(store.on_rank_0(lambda: listing(store.folder)))
        read.append(times_read(reads))
    facts = {"left": left, "unchanged": store.is_unchanged, "read": read, **store.load()}
    files = store.on_rank_0(lambda: listing(store.folder / name_of(steps[-1])))
    return {**facts, "files": files, "open": open_in(store.folder.parent)}


def save_again(store: Store) -> Facts:
    """Save a step that has a checkpoint; return the error, the folder and the result of a load."""
    store.prepare(Plan(0, there=(1, 2)))
    refusal = ""
    try:
        store.save(2)
    except NotImplementedError:
        raise
    except Exception as error:
        refusal = error_text(error)
    left = store.on_rank_0(lambda: listing(store.folder))
    return {"refusal": refusal, "left": left, **store.load()}
