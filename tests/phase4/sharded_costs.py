"""Bodies for task 4.3: what a sharded checkpoint takes of disk, memory and reading."""

import tracemalloc
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from judging.calls import returned
from phase4.file_reads import reads_in
from phase4.sharded import Cut, Plan, own_folder
from phase4_production.given import Shard

NUM_BYTES, NUM_SHARDS = 8_000_000, 8
LARGE_BYTES = 10_000  # what has fewer describes others


def save_large(lesson: Any, root: str, plan: Plan) -> int:
    """Save; return the bytes of the checkpoint."""
    folder = own_folder(root)
    path = returned("save_sharded", lesson.save_sharded(plan.shards(dist.get_rank(), 1), folder, 1))
    return sum(file.stat().st_size for file in Path(path).iterdir())


def memory_of_save(lesson: Any, root: str) -> int:
    """Save shards of NUM_BYTES on one rank; return the most bytes Python held for that."""
    folder = own_folder(root)
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
    """Save beside a checkpoint, load nothing, and load what is wanted.

    Returns:
        For each of them, which ranks have read which large files of the checkpoint.
    """
    folder, rank = own_folder(root), dist.get_rank()
    mine = plan.empty(wanted[rank])
    lesson.save_sharded(plan.shards(rank, 1), folder, 1)
    doing = {
        "save": lambda: lesson.save_sharded(plan.shards(rank, 2), folder, 2),
        "load nothing": lambda: lesson.load_sharded({}, folder),
        "load": lambda: lesson.load_sharded(mine, folder),
    }
    found = {}
    for (what, do), step in zip(doing.items(), (1, 2, 2), strict=True):
        checkpoint = folder / f"step-{step:08d}"
        dist.barrier()
        with reads_in(checkpoint, dist.get_rank) if rank == 0 else nullcontext([]) as reads:
            dist.barrier()
            do()
            dist.barrier()
        large = {read for read in reads if (checkpoint / read.path).stat().st_size > LARGE_BYTES}
        found[what] = sorted((read.rank, str(read.path)) for read in large)
    return found
