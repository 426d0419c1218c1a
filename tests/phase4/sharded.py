"""Bodies for task 4.3: ranks that save their shards, and any number of ranks that load them."""

import os
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import copy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from judging.calls import refusal_of, returned
from judging.tensors import given_group
from phase4.crash_states import build, crash_states, states_at_the_end
from phase4.file_history import Recorder, Sync, listening, recorded, syncs_replaced
from phase4.file_reads import reads_in
from phase4_production.given import Group, Shard

FULL, UNREADABLE = (28, "No space left on device"), (5, "Input/output error")
RETURNED = "phase4.returned"  # name of an audit event
Cut = tuple[str, int, int]  # tensor, start, stop


class Plan(NamedTuple):
    """The slices of tensors that each rank saves."""

    tensors: Mapping[str, tuple[int, str]]  # name -> number of elements, dtype
    by_rank: Sequence[Sequence[Cut]]

    def tensor(self, name: str, step: int) -> Tensor:
        """Return the whole tensor, as it is at a step."""
        numel, dtype = self.tensors[name]
        return (torch.arange(numel) * 7 + 3 * step).remainder(101).to(getattr(torch, dtype))

    def shards(self, rank: int, step: int) -> dict[str, Shard]:
        """Return views of the whole tensors, as those of a flattened parameter are."""
        cuts = self.by_rank[rank]
        return {n: Shard(self.tensor(n, step)[a:b], a, self.tensors[n][0]) for n, a, b in cuts}

    def empty(self, cuts: Sequence[Cut]) -> dict[str, Shard]:
        """Return shards to be filled, in which no number is right."""
        shards = {}
        for name, a, b in cuts:
            numel, dtype = self.tensors[name]
            shards[name] = Shard(torch.full((b - a,), 113).to(getattr(torch, dtype)), a, numel)
        return shards


def values_of(shards: Mapping[str, Shard]) -> dict[str, list[float]]:
    """Return the numbers of shards, by name."""
    return {name: shard.values.tolist() for name, shard in shards.items()}


class Run:
    """The folder of a run, the same on all ranks, and the calls of this rank."""

    def __init__(self, lesson: Any, root: str, plan: Plan, group: Group = None) -> None:
        made = [tempfile.mkdtemp(dir=root)] if dist.get_rank(group) == 0 else [""]
        dist.broadcast_object_list(made, group=group, group_src=0)
        self.folder, self.rank = Path(made[0]) / "run", dist.get_rank(group)
        self.lesson, self.plan, self.options = lesson, plan, given_group(group)

    def save(self, *steps: int, **options: Any) -> Path:
        """Save this rank's shards of some steps; return the last path."""
        for step in steps:
            shards = self.plan.shards(self.rank, step)
            path = self.lesson.save_sharded(shards, self.folder, step, **self.options, **options)
        return Path(returned("save_sharded", path))

    def load(self, cuts: Sequence[Cut] | None = None, folder: Path | None = None) -> dict[str, Any]:
        """Load what is wanted, by default this rank's own shards.

        Returns:
            Step and path, the values beside the right ones, and the reasons of what was skipped.
        """
        cuts = self.plan.by_rank[self.rank] if cuts is None else cuts
        wanted = self.plan.empty(cuts)
        loaded = self.lesson.load_sharded(wanted, folder or self.folder, **self.options)
        step = returned("load_sharded", loaded).step
        right = {name: self.plan.tensor(name, step)[a:b].tolist() for name, a, b in cuts}
        reasons = [[path.name, reason] for path, reason in loaded.skipped.items()]
        return {"step": step, "path": Path(loaded.path).name, "reasons": reasons} | {
            "values": values_of(wanted),
            "right": right,
        }

    def on_rank_0(self, do: Callable[[], object]) -> None:
        """Let rank 0 do something while the others wait."""
        dist.barrier()
        if self.rank == 0:
            do()
        dist.barrier()

    def names(self, step: int | None = None) -> list[str]:
        """Return the names in the folder, or in the checkpoint of a step."""
        folder = self.folder if step is None else self.folder / name_of(step)
        return sorted(path.name for path in folder.iterdir())


def name_of(step: int) -> str:
    """Return the name of a checkpoint."""
    return f"step-{step:08d}"


def save_and_load(
    lesson: Any, root: str, plan: Plan, wanted: Sequence[Sequence[Cut]], group: Group = None
) -> dict[str, Any]:
    """Save steps 1 and 2 on the first ranks, and load on as many as ``wanted`` has."""
    rank, members = dist.get_rank(group), dist.get_process_group_ranks(group)
    writers, readers = (dist.new_group(members[: len(r)]) for r in (plan.by_rank, wanted))
    folder = Run(lesson, root, plan, group).folder
    result: dict[str, Any] = {}
    if rank < len(plan.by_rank):
        for step in (1, 2):
            shards = plan.shards(rank, step)
            before = values_of(shards)
            path = returned(
                "save_sharded", lesson.save_sharded(shards, folder, step, group=writers)
            )
            is_there, place = (folder / name_of(step)).is_dir(), str(Path(path).relative_to(folder))
            result |= {"saved": [place, is_there], "unchanged": before == values_of(shards)}
    dist.barrier(group)
    if rank < len(wanted):
        shards = plan.empty(wanted[rank])
        loaded = returned("load_sharded", lesson.load_sharded(shards, folder, group=readers))
        right = {name: plan.tensor(name, 2)[a:b].tolist() for name, a, b in wanted[rank]}
        result |= {"loaded": [loaded.step, str(Path(loaded.path).relative_to(folder))]}
        result |= {"values": values_of(shards), "right": right}
    return result


def crash(lesson: Any, root: str, plan: Plan, keep: int) -> dict[str, Any]:
    """Save step 3 after 1 and 2; load from all states that a crash may leave.

    The disk of rank 0 is slow, so that the others are as far ahead as they may be. States "after"
    the save are those that a crash leaves as soon as the first rank has returned.
    """
    run, alone = Run(lesson, root, plan), dist.new_group([0])
    run.save(1, 2, keep=keep)
    dist.barrier()
    if run.rank > 0:
        dist.barrier()
        _save_and_say(run, keep)
        dist.barrier()
        return {}
    counts: list[int] = []  # numbers of events before each rank's return
    with (
        recorded(run.folder, lesson, before_sync=_sleep_on_rank_0) as recorder,
        listening(partial(_count_at_return, recorder, counts)),
    ):
        dist.barrier()
        _save_and_say(run, keep)
        dist.barrier()
    ended = copy(recorder)
    ended.events = recorder.events[: min(counts)]
    states = {
        "during": [state for _, state in crash_states(recorder)],
        "after": states_at_the_end(ended),
    }
    loads: dict[str, list[Any]] = {when: [] for when in states}
    for when, found in states.items():
        for place, state in enumerate(found):
            copied = run.folder.parent / f"{when}-{place}"
            build(state, copied)
            loads[when].append(_loaded_alone(lesson, plan, copied, alone))
            shutil.rmtree(copied)
    return loads


def _sleep_on_rank_0() -> None:
    """Take a second of the simulated world, in which the other ranks go on."""
    if dist.get_rank() == 0:
        time.sleep(1)


def _save_and_say(run: Run, keep: int) -> None:
    run.save(3, keep=keep)
    sys.audit(RETURNED)


def _count_at_return(recorder: Recorder, counts: list[int], name: str, _: object) -> None:
    if name == RETURNED:
        recorder.look()
        counts.append(len(recorder.events))


def _loaded_alone(lesson: Any, plan: Plan, folder: Path, alone: Group) -> tuple[int, str]:
    """Load all of a checkpoint on one rank; return its step, and what is wrong."""
    wanted = plan.empty([(name, 0, numel) for name, (numel, _) in plan.tensors.items()])
    try:
        loaded = lesson.load_sharded(wanted, folder, group=alone)
    except Exception as error:
        return -1, f"{type(error).__name__}: {error}"
    if loaded is None:
        return -1, "it found no checkpoint"
    right = all(torch.equal(s.values, plan.tensor(n, loaded.step)) for n, s in wanted.items())
    damaged = [f"{path.name}: {why}" for path, why in loaded.skipped.items()]
    return int(loaded.step), "; ".join(damaged) if right else "other elements than were saved"


class Broken(NamedTuple):
    """Disks that fail whenever something is synced."""

    reasons: Mapping[int, tuple[int, str]]  # rank -> number and text of its OSError
    is_late: bool = False  # True if only the run's folder fails, once step 2 has its name

    def fail(self, folder: Path, sync: Sync, descriptors: tuple[int, ...]) -> None:
        """Sync, or raise in its place."""
        rank = dist.get_rank()
        inodes = [os.fstat(descriptor).st_ino for descriptor in descriptors]
        is_named = (folder / name_of(2)).exists()
        fails_now = not self.is_late or (is_named and folder.stat().st_ino in inodes)
        if rank in self.reasons and fails_now:
            raise OSError(*self.reasons[rank])
        sync(*descriptors)


def save_on_a_broken_disk(
    lesson: Any, root: str, plan: Plan, broken: Broken
) -> tuple[str, list[str]]:
    """Save step 2 while the disks of some ranks fail; then save it again.

    Returns:
        The text of the OSError, and the folder when it was raised.
    """
    run, text = Run(lesson, root, plan), ""
    run.save(1)
    dist.barrier()
    failing = syncs_replaced(partial(broken.fail, run.folder), lesson)
    with failing if run.rank == 0 else nullcontext():  # one process: it counts for all ranks
        dist.barrier()
        try:
            run.save(2)
        except OSError as error:
            text = f"OSError: {error}"
        left = run.names()
        dist.barrier()
    dist.barrier()
    with suppress(FileExistsError):  # a failed save may have left it
        run.save(2)
    return text, left


def load_damaged(lesson: Any, root: str, plan: Plan, damages: Sequence[str]) -> list[Any]:
    """Load where there is nothing yet; then damage each file of step 2 in turn, and load."""
    run = Run(lesson, root, plan)
    nothing = lesson.load_sharded(plan.empty(plan.by_rank[run.rank]), run.folder)
    run.save(1, 2)
    dist.barrier()
    loads: list[Any] = [nothing is None]
    for damage, name in product(damages, run.names(2)):
        file = run.folder / name_of(2) / name
        content = file.read_bytes()
        run.on_rank_0(partial(_damage, file, damage) if content else int)
        step = 1 if content else 2  # an empty file can't be damaged
        loads.append({"file": name, "damage": damage, "right step": step, **run.load()})
        run.on_rank_0(partial(file.write_bytes, content))
    return loads


def _damage(file: Path, damage: str = "changed") -> None:
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
        return
    if damage == "shorter":
        content.pop()
    elif damage == "longer":
        content.append(0)
    else:
        content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _largest(checkpoint: Path) -> Path:
    return max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)


def load_where_all_are_damaged(lesson: Any, root: str, plan: Plan) -> dict[str, Any]:
    """Damage the largest file of both checkpoints, and load."""
    run = Run(lesson, root, plan)
    run.save(1, 2)
    dist.barrier()
    file = _largest(run.folder / name_of(2)).name
    for step in (1, 2):
        run.on_rank_0(partial(_damage, run.folder / name_of(step) / file))
    before = sorted(run.folder.rglob("*"))
    refusal = _refusal_of(run.load)
    unchanged = before == sorted(run.folder.rglob("*"))
    return {"refusal": refusal, "file": file, "unchanged": unchanged}


def _refusal_of(load: Callable[[], object]) -> dict[str, str]:
    """Return what ``load`` raises; errors of disks and of damage are refusals here, too."""
    try:
        return refusal_of(load)
    except NotImplementedError:
        raise
    except (RuntimeError, OSError) as error:
        kind = RuntimeError if isinstance(error, RuntimeError) else OSError
        return {"type": kind.__name__, "text": str(error)}


def load_what_is_missing(lesson: Any, root: str, plan: Plan, wanted: Plan) -> dict[str, Any]:
    """Load what the checkpoint lacks."""
    run = Run(lesson, root, plan)
    run.save(1)
    shards = wanted.empty(wanted.by_rank[run.rank])
    before = values_of(shards)
    refusal = _refusal_of(lambda: lesson.load_sharded(shards, run.folder))
    return {"refusal": refusal, "unchanged": before == values_of(shards)}


def save_what_is_there(lesson: Any, root: str, plan: Plan) -> dict[str, Any]:
    """Save a step twice, then damaged; all with the files of a killed attempt of more ranks."""
    run, refusal = Run(lesson, root, plan), ""
    stale = run.folder / ".step-00000001.partial"
    run.on_rank_0(lambda: stale.mkdir(parents=True))
    run.on_rank_0(lambda: (stale / "rank-00007.bin").write_bytes(b"old"))
    run.save(1)
    names = run.names(1)
    try:
        run.save(1)
    except FileExistsError:
        refusal = "FileExistsError"
    run.on_rank_0(lambda: _damage(_largest(run.folder / name_of(1))))
    run.save(1, 2, 3, keep=2)
    dist.barrier()
    return {"names": names, "refusal": refusal, "left": run.names()}


def save_once(lesson: Any, root: str, plan: Plan, group: Group = None) -> dict[str, Any]:
    """Save and load the same shards."""
    run = Run(lesson, root, plan, group)
    run.save(1)
    return run.load()


def load_with_other_lists(lesson: Any, root: str, plan: Plan) -> dict[str, Any]:
    """Save steps 1 to 3; load where rank 0 no longer sees step 3, and the others still do."""
    run = Run(lesson, root, plan)
    run.save(1, 2, 3)
    others = run.folder.with_name("as-the-others-see-it")

    def hide_step_3() -> None:
        others.mkdir()
        (run.folder / name_of(3)).rename(others / name_of(3))
        for step in (1, 2):
            (others / name_of(step)).symlink_to(run.folder / name_of(step), True)

    run.on_rank_0(hide_step_3)
    return run.load(folder=run.folder if run.rank == 0 else others)


def save_and_keep_two(
    lesson: Any, root: str, plan: Plan, there: Sequence[int], damaged: Sequence[int], step: int
) -> list[str]:
    """Save ``step`` with keep=2 beside others, some of them damaged; return the folder."""
    run = Run(lesson, root, plan)
    run.save(*there, keep=9)
    for other in damaged:
        run.on_rank_0(partial(_damage, _largest(run.folder / name_of(other))))
    dist.barrier()
    run.save(step, keep=2)
    dist.barrier()
    return run.names()


# What a sharded checkpoint takes of disk, memory and reading

NUM_BYTES, NUM_SHARDS = 8_000_000, 8
LARGE_BYTES = 10_000  # least size of a file of elements; smaller files describe others


def save_large(lesson: Any, root: str, plan: Plan) -> int:
    """Save; return the bytes of the checkpoint."""
    return sum(file.stat().st_size for file in Run(lesson, root, plan).save(1).iterdir())


def memory_of_save(lesson: Any, root: str) -> int:
    """Save shards of NUM_BYTES on one rank; return the most bytes that Python held for that."""
    folder = Run(lesson, root, Plan({}, [])).folder
    parts = torch.zeros(NUM_BYTES // 4).chunk(NUM_SHARDS)
    shards = {f"layer.{place}": Shard(part, 0, len(part)) for place, part in enumerate(parts)}
    tracemalloc.start()
    try:
        lesson.save_sharded(shards, folder, 1)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def who_reads(
    lesson: Any, root: str, plan: Plan, wanted: Sequence[Sequence[Cut]]
) -> dict[str, list[tuple[int, str]]]:
    """Return which rank reads which large file in a save, a load of nothing and one of a slice."""
    run = Run(lesson, root, plan)
    shards = plan.empty(wanted[run.rank])
    run.save(1)
    doing: dict[str, tuple[int, Callable[[], object]]] = {
        "save": (1, lambda: run.save(2)),
        "load nothing": (2, lambda: lesson.load_sharded({}, run.folder)),
        "load": (2, lambda: lesson.load_sharded(shards, run.folder)),
    }
    found = {}
    for what, (step, do) in doing.items():
        checkpoint = run.folder / name_of(step)
        dist.barrier()
        with reads_in(checkpoint, dist.get_rank) if run.rank == 0 else nullcontext([]) as reads:
            dist.barrier()
            do()
            dist.barrier()
        large = {read for read in reads if (checkpoint / read.path).stat().st_size > LARGE_BYTES}
        found[what] = sorted((read.rank, str(read.path)) for read in large)
    return found
