"""Compare Phase 3's three ZeRO stages with torch's ZeroRedundancyOptimizer and FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from distlab import launch
from distlab.bench import contest
from distlab.bench.contest import Collectives, Contest, Contestant, Lesson, Measured
from distlab.sim.device.device import Device
from distlab.util.text import bytes_text, counted

with warnings.catch_warnings():  # importing the module triggers deprecation warnings
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

STATE, GRADIENTS, PARAMETERS = "stage 1", "stage 2", "stage 3"
REDUNDANCY, KEPT, FREED = "ZeroRedundancyOptimizer", "FSDP2, kept whole", "FSDP2"
RIVALS = {REDUNDANCY: STATE, KEPT: GRADIENTS, FREED: PARAMETERS}
ADAM: dict[str, Any] = {"lr": 1e-3, "fused": True}
LARGEST_DIFFERENCE = 1e-3  # allowed, relative to an update; float32 sums depend on their order
WARM_UP = 3  # number of steps; Adam creates its state in the first one
STATUS = Path("/proc/self/status")  # exists only on Linux
NOTES = """\
A step: zero_grad, forward, backward and fused AdamW, all in float32. FSDP2 has no stage 2; nearest
is reshard_after_forward=False, which keeps the parameters whole from the forward to the backward
pass, but not between the steps, as stage 2 does. Collectives and bytes are those of a second step;
bytes are those of all tensors that they are called with, results in memory of their own included.
On gloo, ours send a message to each other rank instead, which counts with what it sends.
Peak memory: most bytes in tensors at once during two steps, parameters and optimizer included, on
the rank with most. Of what a collective needs inside, only the process knows.
Process: how far the resident memory of a fresh process rises, from before there is a model."""
PROCESS: contest.Column = ("process", "resident_bytes", bytes_text)


class Sizes(NamedTuple):
    """Sizes of a network with layers of Linear + LayerNorm, and of its buckets."""

    rows: int = 64
    width: int = 512
    layers: int = 16
    bucket_mib: float = 2.0


def model_of(sizes: Sizes) -> nn.Sequential:
    """Return the same model on all ranks."""
    torch.manual_seed(0)
    width = sizes.width
    layers = (
        nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(sizes.layers)
    )
    return nn.Sequential(*layers)


# Contestants


class Trained(NamedTuple):
    """A contestant with an optimizer; ``whole`` is a collective that gathers all parameters."""

    contestant: Contestant
    whole: Callable[[], Mapping[str, Tensor]]


def _stage_1(lesson: Any, sizes: Sizes, x: Tensor) -> Trained:
    model = model_of(sizes)
    optimizer = lesson.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **ADAM)
    return Trained(_trained_by(model, optimizer, x), partial(_copies, model))


def _stage_2(lesson: Any, sizes: Sizes, x: Tensor) -> Trained:
    model, limit = model_of(sizes), {"bucket_bytes": int(sizes.bucket_mib * 2**20)}
    cls = lesson.ShardedGradientOptimizer
    optimizer = cls(model.parameters(), torch.optim.AdamW, **limit, **ADAM)
    return Trained(_trained_by(model, optimizer, x), partial(_copies, model))


def _stage_3(lesson: Any, sizes: Sizes, x: Tensor) -> Trained:
    model = lesson.FullyShardedDataParallel(model_of(sizes), compute_dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    return Trained(_trained_by(model, optimizer, x), model.full_state_dict)


def _redundancy(_: Any, sizes: Sizes, x: Tensor) -> Trained:
    plain = model_of(sizes)
    model = nn.parallel.DistributedDataParallel(
        plain, bucket_cap_mb=sizes.bucket_mib, gradient_as_bucket_view=True
    )
    optimizer = ZeroRedundancyOptimizer(
        plain.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAM
    )
    return Trained(_trained_by(model, optimizer, x), partial(_copies, plain))


def _fsdp2(is_freed: bool, _: Any, sizes: Sizes, x: Tensor) -> Trained:
    model, mesh = model_of(sizes), init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=is_freed)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    return Trained(_trained_by(model, optimizer, x), partial(_gathered, model))


CONTESTANTS: dict[str, Callable[[Any, Sizes, Tensor], Trained]] = {
    STATE: _stage_1,
    REDUNDANCY: _redundancy,
    GRADIENTS: _stage_2,
    KEPT: partial(_fsdp2, False),
    PARAMETERS: _stage_3,
    FREED: partial(_fsdp2, True),
}


def _trained_by(model: nn.Module, optimizer: Any, x: Tensor) -> Contestant:
    backward = contest.plain(model, x).step

    def step() -> float | None:
        optimizer.zero_grad()
        loss = backward()
        optimizer.step()
        return loss

    return Contestant(model, step)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _gathered(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: param.full_tensor() for name, param in named if isinstance(param, DTensor)}


# Measurements


def measure(lesson: Lesson, sizes: Sizes, repeats: int) -> dict[str, Measured]:
    """Measure steps of all contestants on copies of one model and this rank's batch.

    Raises:
        ValueError: After two steps, our parameters differ from the rival's.
    """
    zero, x = lesson("zero"), _batch(sizes)
    contestants, counts, values = {}, {}, {}
    for name, make in CONTESTANTS.items():
        with Device(None, advance=lambda *_: None) as device:
            trained = make(zero, sizes, x)
            device.memory.restart_peak()
            trained.contestant.run()
            with Collectives(contest.RECEIVING) as collectives:
                trained.contestant.run()
        contestants[name], values[name] = trained.contestant, trained.whole()
        counts[name] = contest.counts_of(device, collectives)
    for rival, ours in RIVALS.items():
        check_values(values[ours], values[rival], sizes, f"{ours} and {rival}")
    return contest.timed(contestants, counts, repeats)


def _batch(sizes: Sizes) -> Tensor:
    torch.manual_seed(dist.get_rank())
    return torch.randn(sizes.rows, sizes.width)


def check_values(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], sizes: Sizes, pair: str
) -> None:
    """Check that two contestants have reached the same parameters.

    Raises:
        ValueError: The difference is too large relative to the update.
    """
    for name, first in model_of(sizes).named_parameters():
        update = (theirs[name] - first).norm().item()
        difference = (theirs[name] - ours[name]).norm().item()
        if not difference <= LARGEST_DIFFERENCE * update:
            raise ValueError(
                f"{pair} do not train the same: on rank {dist.get_rank()}, after two steps, {name} "
                f"differs by {difference:.3g}, and it was updated by {update:.3g}"
            )


def add_processes(measured: dict[str, Measured], ranks: int, lesson: Lesson, sizes: Sizes) -> None:
    """Add the memory growth of a fresh process for each contestant."""
    for name in measured:
        grown = launch.run(resident_on_rank, ranks, lesson, sizes, name, backend="gloo")
        measured[name]["resident_bytes"] = max(grown)


def resident_on_rank(lesson: Lesson, sizes: Sizes, name: str) -> int:
    """Return the peak memory growth of this process while one contestant trains, in bytes."""
    zero, x = lesson("zero"), _batch(sizes)
    small = sizes._replace(width=8, layers=1)  # run first, so that lazy imports do not count
    CONTESTANTS[name](zero, small, x[:, :8]).contestant.run()
    before = _resident("VmRSS")
    trained = CONTESTANTS[name](zero, sizes, x)
    for _ in range(WARM_UP):
        trained.contestant.run()
    return _resident("VmHWM") - before


def _resident(key: str) -> int:
    if not STATUS.exists():
        return 0
    rows = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return 1024 * int(rows[key].split()[0])


CONTEST = Contest(
    "zero",
    ("3.12", "3.13", "3.14"),
    RIVALS,
    Sizes(),
    lambda sizes, ranks, repeats: (
        f"{counted(sizes.layers, 'layer')} on {counted(ranks, 'gloo rank')}: "
        f"median of {repeats} steps"
    ),
    measure,
    # One table with all columns would be too wide.
    ((contest.STEP, contest.PEAK, PROCESS), (contest.COLLECTIVES, contest.BYTES)),
    (NOTES, contest.PARENTHESES),
    add_processes,
)
