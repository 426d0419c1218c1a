"""Bodies for task 4.3: ranks that save their shards, and any number of ranks that load them."""

import os
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grade import WrongResult
from judging.calls import refusal_of, returned
from judging.tensors import given_group
from phase4 import stores
from phase4.file_history import Sync, reads_in, syncs_replaced
from phase4.stores import Facts, Plan, Store, listing, name_of
from phase4_production.given import Group, Shard

Cut = tuple[str, int, int]  # tensor, start, stop


class Slices(NamedTuple):
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
        """Return shards to be filled, without a right number."""
        shards = {}
        for name, a, b in cuts:
            numel, dtype = self.tensors[name]
            shards[name] = Shard(torch.full((b - a,), 113).to(getattr(torch, dtype)), a, numel)
        return shards

    def whole(self) -> list[Cut]:
        """Return all of each tensor."""
        return [(name, 0, numel) for name, (numel, _) in self.tensors.items()]


def values_of(shards: Mapping[str, Shard]) -> dict[str, list[float]]:
    """Return the numbers of shards, by name."""
    return {name: shard.values.tolist() for name, shard in shards.items()}


class Shards(Store):
    """The checkpoints of several ranks, each with its slices."""

    loads = "load_sharded"

    def __init__(self, lesson: Any, root: str, slices: Slices, group: Group = None) -> None:
        super().__init__(lesson, root, group)
        self.slices, self.options = slices, given_group(group)

    def save(self, step: int, *, keep: int = 9) -> Path:
        shards = self.slices.shards(self.rank, step)
        before = values_of(shards)
        path = self.lesson.save_sharded(shards, self.folder, step, keep=keep, **self.options)
        self.is_unchanged &= values_of(shards) == before
        return Path(returned("save_sharded", path))

    def _load(self, folder: Path, alone: Group) -> tuple[Any, bool] | None:
        cuts = self.slices.whole() if alone else self.slices.by_rank[self.rank]
        wanted = self.slices.empty(cuts)
        options = self.options if alone is None else {"group": alone}
        loaded = self.lesson.load_sharded(wanted, folder, **options)
        if loaded is None:
            return None
        right = {name: self.slices.tensor(name, loaded.step)[a:b].tolist() for name, a, b in cuts}
        return loaded, values_of(wanted) == right


def run(
    lesson: Any, root: str, slices: Slices, body: str, *args: object, group: Group = None
) -> Any:
    """Run a body of ``stores`` on all ranks."""
    return getattr(stores, body)(Shards(lesson, root, slices, group), *args)


def save_and_load(
    lesson: Any, root: str, slices: Slices, wanted: Sequence[Sequence[Cut]], group: Group = None
) -> Facts:
    """Save steps 1 and 2 on the first ranks, and load on as many as ``wanted`` has."""
    rank, members = dist.get_rank(group), dist.get_process_group_ranks(group)
    writers, readers = (dist.new_group(members[: len(r)]) for r in (slices.by_rank, wanted))
    store = Shards(lesson, root, slices, group)
    facts: Facts = {}
    if rank < len(slices.by_rank):
        store.options = given_group(writers)
        path = [store.save(step) for step in (1, 2)][-1]
        place, is_there = str(path.relative_to(store.folder)), (store.folder / name_of(2)).is_dir()
        facts |= {"saved": [place, is_there], "unchanged": store.is_unchanged}
    dist.barrier(group)
    if rank < len(wanted):
        shards = slices.empty(wanted[rank])
        loaded = returned("load_sharded", lesson.load_sharded(shards, store.folder, group=readers))
        right = {name: slices.tensor(name, 2)[a:b].tolist() for name, a, b in wanted[rank]}
        facts |= {"loaded": [loaded.step, str(Path(loaded.path).relative_to(store.folder))]}
        facts |= {"values": values_of(shards), "right": right}
    return facts


def load_with_other_lists(lesson: Any, root: str, slices: Slices) -> Facts:
    """Save steps 1 to 3; load where rank 0 no longer sees step 3, and the others still do."""
    store = Shards(lesson, root, slices).prepare(Plan(0, there=(1, 2, 3)))
    others = store.folder.with_name("as-the-others-see-it")

    def hide_step_3() -> None:
        others.mkdir()
        (store.folder / name_of(3)).rename(others / name_of(3))
        for step in (1, 2):
            (others / name_of(step)).symlink_to(store.folder / name_of(step), True)

    store.on_rank_0(hide_step_3)
    facts = store.load(store.folder if store.rank == 0 else others)
    if facts["error"]:  # the other ranks may wait for this one
        raise WrongResult(f"load_sharded raised {facts['error']}")
    return facts


class Broken(NamedTuple):
    """Disks that fail whenever something is synced."""

    reasons: Mapping[int, tuple[int, str]]  # rank -> number and text of its OSError
    is_late: bool = False  # True if only the run's folder fails, once step 2 has its name

    def fail(self, folder: Path, sync: Sync, descriptors: tuple[int, ...]) -> None:
        """Sync, or raise instead."""
        rank = dist.get_rank()
        inodes = [os.fstat(descriptor).st_ino for descriptor in descriptors]
        is_named = (folder / name_of(2)).exists()
        fails_now = not self.is_late or (is_named and folder.stat().st_ino in inodes)
        if rank in self.reasons and fails_now:
            raise OSError(*self.reasons[rank])
        sync(*descriptors)


def save_on_a_broken_disk(
    lesson: Any, root: str, slices: Slices, broken: Broken
) -> tuple[str, list[str]]:
    """Save step 2 while disks fail, and again; return the OSError, and the folder it left."""
    store, text = Shards(lesson, root, slices).prepare(Plan(0, there=(1,))), ""
    failing = syncs_replaced(partial(broken.fail, store.folder), lesson)
    with failing if store.rank == 0 else nullcontext():  # one process: it counts for all ranks
        dist.barrier()
        try:
            store.save(2)
        except OSError as error:
            text = f"OSError: {error}"
        left = listing(store.folder)
        dist.barrier()
    dist.barrier()
    with suppress(FileExistsError):  # a failed save may have left it
        store.save(2)
    return text, left


def load_what_is_missing(lesson: Any, root: str, slices: Slices, wanted: Slices) -> Facts:
    """Load what the checkpoint lacks."""
    store = Shards(lesson, root, slices).prepare(Plan(0, there=(1,)))
    shards = wanted.empty(wanted.by_rank[store.rank])
    before = values_of(shards)
    refusal = refusal_of(lambda: lesson.load_sharded(shards, store.folder))
    return {"refusal": refusal, "unchanged": before == values_of(shards)}


# What a sharded checkpoint takes of disk, memory and reading

NUM_BYTES, NUM_SHARDS = 8_000_000, 8
LARGE_BYTES = 10_000  # least size of a file of elements; smaller files describe others


def save_large(lesson: Any, root: str, slices: Slices) -> int:
    """Save; return the bytes of the checkpoint."""
    return sum(file.stat().st_size for file in Shards(lesson, root, slices).save(1).iterdir())


def memory_of_save(lesson: Any, root: str) -> int:
    """Save shards of NUM_BYTES on one rank; return the most bytes that Python held for that."""
    parts = torch.zeros(NUM_BYTES // 4).chunk(NUM_SHARDS)
    shards = {f"layer.{place}": Shard(part, 0, len(part)) for place, part in enumerate(parts)}
    tracemalloc.start()
    try:
        lesson.save_sharded(shards, Path(root) / "run", 1)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def who_reads(
    lesson: Any, root: str, slices: Slices, wanted: Sequence[Sequence[Cut]]
) -> dict[str, list[tuple[int, str]]]:
    """Return which rank reads which large file in a save, a load of nothing and one of a slice."""
    store = Shards(lesson, root, slices).prepare(Plan(0, there=(1,)))
    shards = slices.empty(wanted[store.rank])
    doing: dict[str, tuple[int, Callable[[], object]]] = {
        "save": (1, lambda: store.save(2)),
        "load nothing": (2, lambda: lesson.load_sharded({}, store.folder)),
        "load": (2, lambda: lesson.load_sharded(shards, store.folder)),
    }
    facts = {}
    for what, (step, do) in doing.items():
        checkpoint = store.folder / name_of(step)
        dist.barrier()
        with reads_in(checkpoint, dist.get_rank) if store.rank == 0 else nullcontext([]) as reads:
            dist.barrier()
            do()
            dist.barrier()
        large = {read for read in reads if (checkpoint / read.path).stat().st_size > LARGE_BYTES}
        facts[what] = sorted((read.rank, str(read.path)) for read in large)
    return facts
