"""Compare Phase 3's three stages of data parallelism with torch's DistributedDataParallel."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from distlab.bench import contest
from distlab.bench.contest import Contest, Lesson, Measured
from distlab.util.text import counted

OURS, FLAT, PER_PARAMETER, TORCHS = "ours", "one flat all-reduce", "one per parameter", "torch's"
RIVALS = {FLAT: OURS, PER_PARAMETER: OURS, TORCHS: OURS}
STAGES = """\
Flat: all gradients are summed after the backward pass. Per parameter: each is summed in its hook.
Torch's: DistributedDataParallel with the same limits and gradient_as_bucket_view. Collectives are
those of the second step, in which torch's ranks also agree on new buckets."""


class Sizes(NamedTuple):
    """Sizes of a deep network of Linear and LayerNorm pairs, and of its buckets."""

    rows: int = 64
    width: int = 512
    layers: int = 24
    bucket_mib: float = 4.0


def measure(lesson: Lesson, sizes: Sizes, repeats: int) -> dict[str, Measured]:
    """Measure the three stages and torch's DDP on copies of one model and this rank's batch."""
    torch.manual_seed(dist.get_rank())
    width, limit = sizes.width, int(sizes.bucket_mib * 2**20)
    pairs = [(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(sizes.layers)]
    model = nn.Sequential(*(layer for pair in pairs for layer in pair))
    x, ddp = torch.randn(sizes.rows, width), lesson("ddp")
    # When a limit is given, torch applies it to the first bucket too.
    limits = {"bucket_bytes": limit, "first_bucket_bytes": limit}
    ours = {
        OURS: ddp.DistributedDataParallel(copy.deepcopy(model), **limits),
        FLAT: ddp.FlatDataParallel(copy.deepcopy(model)),
        PER_PARAMETER: ddp.PerParameterDataParallel(copy.deepcopy(model)),
    }
    torchs = nn.parallel.DistributedDataParallel(
        copy.deepcopy(model), bucket_cap_mb=sizes.bucket_mib, gradient_as_bucket_view=True
    )
    contestants = {
        name: contest.plain(wrapped, x, wrapped.finish_gradient_synchronization)
        for name, wrapped in ours.items()
    }
    return contest.measure({**contestants, TORCHS: contest.plain(torchs, x)}, RIVALS, repeats)


CONTEST = Contest(
    "ddp",
    ("3.11",),
    RIVALS,
    Sizes(),
    lambda sizes, ranks, repeats: (
        f"{counted(4 * sizes.layers, 'parameter')} on {counted(ranks, 'gloo rank')}: "
        f"median of {repeats} steps"
    ),
    measure,
    ((contest.STEP, contest.COLLECTIVES, contest.BYTES, contest.PEAK),),
    (STAGES, contest.PARENTHESES, contest.PEAK_MEMORY),
)
