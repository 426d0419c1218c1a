"""Bodies for task 4.3: ranks that save their shards, and any number of ranks that load them."""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from judging.calls import refusal_of, returned
from phase4.crash_states import build, crash_states, states_at_the_end
from phase4.file_history import Recorder, Sync, listening, recorded, syncs_replaced
from phase4_production.given import Group, Shard

FULL, UNREADABLE = (28, "No space left on device"), (5, "Input/output error")
RETURNED = "phase4.returned"  # an event for sys.audit
Cut = tuple[str, int, int]  # tensor, start, stop


class Plan(NamedTuple):
    """Who saves which slices of which tensors."""

    tensors: Mapping[str, tuple[int, str]]  # name -> number of elements, dtype
    by_rank: Sequence[Sequence[Cut]]

    def tensor(self, name: str, step: int) -> Tensor:
        """The whole tensor, as it is at a step."""
        numel, dtype = self.tensors[name]
        return (torch.arange(numel) * 7 + 3 * step).remainder(101).to(getattr(torch, dtype))

    def shards(self, rank: int, step: int) -> dict[str, Shard]:
        """Views of the whole tensors, as those of a flattened parameter are."""
        cuts = self.by_rank[rank]
        return {
            name: Shard(self.tensor(name, step)[a:b], a, self.tensors[name][0])
            for name, a, b in cuts
        }

    def empty(self, cuts: Sequence[Cut]) -> dict[str, Shard]:
        """What is to be filled: none of the numbers is right."""
        found = {}
        for name, a, b in cuts:
            numel, dtype = self.tensors[name]
            found[name] = Shard(torch.full((b - a,), 113).to(getattr(torch, dtype)), a, numel)
        return found


def own_folder(root: str, group: Group = None) -> Path:
    """A new folder, the same on all ranks."""
    made = [tempfile.mkdtemp(dir=root)] if dist.get_rank(group) == 0 else [""]
    dist.broadcast_object_list(made, group=group, group_src=0)
    return Path(made[0]) / "run"


def save_and_load(
    lesson: Any, root: str, plan: Plan, wanted: Sequence[Sequence[Cut]], group: Group = None
) -> dict[str, Any]:
    """Save steps 1 and 2 on the first ranks, and load on as many as ``wanted`` has."""
    folder = own_folder(root, group)
    rank = dist.get_rank(group)
    writers = _first(len(plan.by_rank), group)
    readers = _first(len(wanted), group)
    result: dict[str, Any] = {}
    if rank < len(plan.by_rank):
        for step in (1, 2):
            shards = plan.shards(rank, step)
            before = {name: shard.values.tolist() for name, shard in shards.items()}
            path = returned(
                "save_sharded", lesson.save_sharded(shards, folder, step, group=writers)
            )
            result |= {
                "path": str(Path(path).relative_to(folder)),
                "is_there": (folder / f"step-{step:08d}").is_dir(),
                "unchanged": before == {n: s.values.tolist() for n, s in shards.items()},
            }
    dist.barrier(group)
    if rank < len(wanted):
        mine = plan.empty(wanted[rank])
        found = returned("load_sharded", lesson.load_sharded(mine, folder, group=readers))
        result |= {
            "step": found.step,
            "loaded_path": str(Path(found.path).relative_to(folder)),
            "skipped": len(found.skipped),
            "values": {name: shard.values.tolist() for name, shard in mine.items()},
            "right": {name: plan.tensor(name, 2)[a:b].tolist() for name, a, b in wanted[rank]},
            "bytes": sum(file.stat().st_size for file in (folder / "step-00000002").iterdir()),
        }
    return result


def _first(count: int, group: Group) -> Group:
    members = dist.get_process_group_ranks(group)
    return dist.new_group(members[:count])


def crash(lesson: Any, root: str, plan: Plan, keep: int) -> dict[str, Any]:
    """Save step 3 after 1 and 2; what a load finds of all that a crash may leave.

    The disk of rank 0 is slow, so that the others are as far ahead as they may be. What is left
    "after" the save is what a crash leaves as soon as the first rank has returned.
    """
    folder, rank = own_folder(root), dist.get_rank()
    alone = dist.new_group([0])
    for step in (1, 2):
        lesson.save_sharded(plan.shards(rank, step), folder, step, keep=keep)
    dist.barrier()
    if rank > 0:
        dist.barrier()
        _save_and_say(lesson, plan, folder, keep)
        dist.barrier()
        return {}
    counts: list[int] = []  # of the events before each rank's return
    with (
        recorded(folder, lesson, before_sync=_sleep_on_rank_0) as recorder,
        listening(partial(_count_at_return, recorder, counts)),
    ):
        dist.barrier()
        _save_and_say(lesson, plan, folder, keep)
        dist.barrier()
    ended = copy(recorder)
    ended.events = recorder.events[: min(counts)]
    during = [state for _, state in crash_states(recorder)]
    found = {"during": [], "after": [], "steps": []}  # type: dict[str, Any]
    for when, states in (("during", during), ("after", states_at_the_end(ended))):
        for place, state in enumerate(states):
            copied = folder.parent / f"{when}-{place}"
            build(state, copied)
            found[when].append(_loaded_alone(lesson, plan, copied, alone))
            shutil.rmtree(copied)
    return found


def _sleep_on_rank_0() -> None:
    """Take a second of the simulated world, in which the other ranks go on."""
    if dist.get_rank() == 0:
        time.sleep(1)


def _save_and_say(lesson: Any, plan: Plan, folder: Path, keep: int) -> None:
    lesson.save_sharded(plan.shards(dist.get_rank(), 3), folder, 3, keep=keep)
    sys.audit(RETURNED)


def _count_at_return(recorder: Recorder, counts: list[int], name: str, _: object) -> None:
    if name == RETURNED:
        recorder.look()
        counts.append(len(recorder.events))


def _loaded_alone(lesson: Any, plan: Plan, folder: Path, alone: Group) -> dict[str, Any]:
    wanted = plan.empty([(name, 0, numel) for name, (numel, _) in plan.tensors.items()])
    try:
        loaded = lesson.load_sharded(wanted, folder, group=alone)
    except Exception as error:
        return {"step": -1, "error": f"{type(error).__name__}: {error}"}
    if loaded is None:
        return {"step": -1, "error": "it found no checkpoint"}
    right = all(torch.equal(s.values, plan.tensor(n, loaded.step)) for n, s in wanted.items())
    damaged = [f"{path.name}: {why}" for path, why in loaded.skipped.items()]
    error = "; ".join(damaged) if right else "other elements than were saved"
    return {"step": int(loaded.step), "error": error}


class Broken(NamedTuple):
    """Disks that fail whenever something is synced, until the others are told."""

    reasons: Mapping[int, tuple[int, str]]  # rank -> number and text of its OSError
    is_late: bool = False  # only the run's folder can't be synced, once step 2 has its name

    def fail(self, folder: Path, sync: Sync, descriptors: tuple[int, ...]) -> None:
        """Sync, or raise in its place."""
        rank = dist.get_rank()
        here = [os.fstat(descriptor).st_ino for descriptor in descriptors]
        is_named = (folder / "step-00000002").exists()
        fails_now = not self.is_late or (is_named and folder.stat().st_ino in here)
        if rank in self.reasons and fails_now:
            raise OSError(*self.reasons[rank])
        sync(*descriptors)


def save_on_a_broken_disk(lesson: Any, root: str, plan: Plan, broken: Broken) -> dict[str, Any]:
    """Save step 2 while the disks of some ranks fail; then save it again."""
    folder, rank = own_folder(root), dist.get_rank()
    lesson.save_sharded(plan.shards(rank, 1), folder, 1)
    dist.barrier()
    error = {"type": "", "text": ""}
    failing = syncs_replaced(partial(broken.fail, folder), lesson)
    with failing if rank == 0 else nullcontext():  # one process: it counts for all ranks
        dist.barrier()
        try:
            lesson.save_sharded(plan.shards(rank, 2), folder, 2)
        except OSError as raised:
            error = {"type": "OSError", "text": f"{raised}"}
        left = sorted(path.name for path in folder.iterdir())
        dist.barrier()
    dist.barrier()
    with suppress(FileExistsError):  # if it is left there
        lesson.save_sharded(plan.shards(rank, 2), folder, 2)
    return {"error": error, "left": left}


def load_damaged(lesson: Any, root: str, plan: Plan, damages: Sequence[str]) -> list[Any]:
    """Damage each file of step 2 in turn; load each time, and then with step 1 damaged too."""
    folder, rank = own_folder(root), dist.get_rank()
    nothing = lesson.load_sharded(plan.empty(plan.by_rank[rank]), folder)
    for step in (1, 2):
        lesson.save_sharded(plan.shards(rank, step), folder, step)
    dist.barrier()
    names = sorted(path.name for path in (folder / "step-00000002").iterdir())
    found: list[Any] = [nothing is None]
    for damage in damages:
        for name in names:
            file = folder / "step-00000002" / name
            content = file.read_bytes()
            dist.barrier()
            if rank == 0 and content:
                _damage(file, damage)
            dist.barrier()
            mine = plan.empty(plan.by_rank[rank])
            loaded = returned("load_sharded", lesson.load_sharded(mine, folder))
            found.append(
                {
                    "file": name,
                    "damage": damage,
                    "is_damaged": bool(content),
                    "step": loaded.step,
                    "reasons": [[path.name, why] for path, why in loaded.skipped.items()],
                    "values": {n: s.values.tolist() for n, s in mine.items()},
                    "right": {
                        n: s.values.tolist() for n, s in plan.shards(rank, loaded.step).items()
                    },
                }
            )
            dist.barrier()
            if rank == 0:
                file.write_bytes(content)
            dist.barrier()
    return found


def _damage(file: Path, damage: str) -> None:
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


def load_where_all_are_damaged(lesson: Any, root: str, plan: Plan) -> dict[str, Any]:
    """Damage the largest file of both checkpoints, and load."""
    folder, rank = own_folder(root), dist.get_rank()
    for step in (1, 2):
        lesson.save_sharded(plan.shards(rank, step), folder, step)
    dist.barrier()
    file = _largest(folder / "step-00000002").name
    dist.barrier()
    if rank == 0:
        for step in (1, 2):
            _damage(folder / f"step-0000000{step}" / file, "changed")
    dist.barrier()
    before = sorted(folder.rglob("*"))
    refusal = _refusal_of(lambda: lesson.load_sharded(plan.empty(plan.by_rank[rank]), folder))
    return {"refusal": refusal, "file": file, "unchanged": before == sorted(folder.rglob("*"))}


def _refusal_of(load: Callable[[], object]) -> dict[str, str]:
    """Return what ``load`` raises; errors of disks and of damage are refusals here, too."""
    try:
        return refusal_of(load)
    except NotImplementedError:
        raise
    except (RuntimeError, OSError) as error:
        kind = RuntimeError if isinstance(error, RuntimeError) else OSError
        return {"type": kind.__name__, "text": str(error)}


def _largest(checkpoint: Path) -> Path:
    return max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)


def load_what_is_missing(lesson: Any, root: str, plan: Plan, wanted: Plan) -> dict[str, Any]:
    """Load what the checkpoint lacks."""
    folder, rank = own_folder(root), dist.get_rank()
    lesson.save_sharded(plan.shards(rank, 1), folder, 1)
    mine = wanted.empty(wanted.by_rank[rank])
    before = {name: shard.values.tolist() for name, shard in mine.items()}
    refusal = _refusal_of(lambda: lesson.load_sharded(mine, folder))
    after = {name: shard.values.tolist() for name, shard in mine.items()}
    return {"refusal": refusal, "unchanged": before == after}


def save_what_is_there(lesson: Any, root: str, plan: Plan) -> dict[str, Any]:
    """Save a step twice, then damaged; all with what a killed attempt of more ranks has left."""
    folder, rank = own_folder(root), dist.get_rank()
    if rank == 0:
        stale = folder / ".step-00000001.partial"
        stale.mkdir(parents=True)
        (stale / "rank-00007.bin").write_bytes(b"old")
    dist.barrier()
    lesson.save_sharded(plan.shards(rank, 1), folder, 1)
    names = sorted(path.name for path in (folder / "step-00000001").iterdir())
    refused = ""
    try:
        lesson.save_sharded(plan.shards(rank, 1), folder, 1)
    except FileExistsError:
        refused = "FileExistsError"
    dist.barrier()
    if rank == 0:
        _damage(_largest(folder / "step-00000001"), "changed")
    dist.barrier()
    for step in (1, 2, 3):
        lesson.save_sharded(plan.shards(rank, step), folder, step, keep=2)
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    return {"names": names, "refused": refused, "left": left}


def save_once(lesson: Any, root: str, plan: Plan, group: Group = None) -> dict[str, Any]:
    """Save and load the same shards."""
    folder, rank = own_folder(root, group), dist.get_rank(group)
    lesson.save_sharded(plan.shards(rank, 1), folder, 1, group=group)
    mine = plan.empty(plan.by_rank[rank])
    lesson.load_sharded(mine, folder, group=group)
    return {
        "values": {name: shard.values.tolist() for name, shard in mine.items()},
        "right": {name: shard.values.tolist() for name, shard in plan.shards(rank, 1).items()},
    }


def load_with_other_lists(lesson: Any, root: str, plan: Plan) -> dict[str, Any]:
    """Save steps 1 to 3; load where rank 0 no longer sees step 3, and the others still do."""
    folder, rank = own_folder(root), dist.get_rank()
    for step in (1, 2, 3):
        lesson.save_sharded(plan.shards(rank, step), folder, step)
    seen = folder if rank == 0 else folder.with_name("as-the-others-see-it")
    dist.barrier()
    if rank == 0:
        others = folder.with_name("as-the-others-see-it")
        others.mkdir()
        (folder / "step-00000003").rename(others / "step-00000003")
        for name in ("step-00000001", "step-00000002"):
            (others / name).symlink_to(folder / name, target_is_directory=True)
    dist.barrier()
    mine = plan.empty(plan.by_rank[rank])
    loaded = returned("load_sharded", lesson.load_sharded(mine, seen))
    return {
        "step": loaded.step,
        "values": {name: shard.values.tolist() for name, shard in mine.items()},
        "right": {name: shard.values.tolist() for name, shard in plan.shards(rank, 2).items()},
    }


def save_and_keep_two(
    lesson: Any, root: str, plan: Plan, there: Sequence[int], damaged: Sequence[int], step: int
) -> list[str]:
    """Save ``step`` with keep=2 beside others, some of them damaged; return what is left."""
    folder, rank = own_folder(root), dist.get_rank()
    for other in there:
        lesson.save_sharded(plan.shards(rank, other), folder, other, keep=9)
    dist.barrier()
    if rank == 0:
        for other in damaged:
            _damage(_largest(folder / f"step-{other:08d}"), "changed")
    dist.barrier()
    lesson.save_sharded(plan.shards(rank, step), folder, step, keep=2)
    dist.barrier()
    return sorted(path.name for path in folder.iterdir())
