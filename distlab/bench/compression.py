"""Compare Phase 4's gradient compression with torch's own hooks, both under torch's DDP."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from distlab.bench import contest
from distlab.bench.contest import Contest, Contestant, Lesson, Measured
from distlab.util.text import bytes_text, counted

OUR_POWER_SGD, OUR_TOP_K = "ours, PowerSGD", "ours, top-k 1 %"
OUR_INT8, OUR_SIGN = "ours, int8", "ours, sign"
PLAIN, FP16, POWER_SGD = "torch's, plain", "torch's, fp16", "torch's PowerSGD"
RIVALS = {PLAIN: OUR_TOP_K, FP16: OUR_INT8, POWER_SGD: OUR_POWER_SGD}
NOTES = """\
All ways train one model from the same start with torch's DistributedDataParallel; only the hook
differs. Bytes: what a rank sends in a step, with rings: 2 (N - 1) / N of each all-reduce's tensor,
N - 1 times that of each all-gather, (N - 1) / N of that of each all-to-all and reduce-scatter. They
are counted where hooks call torch.distributed; other calls are not. Torch's PowerSGD sends plain
gradients in its first two steps, and its bytes are those after that. There is one bucket: with
several, torch's PowerSGD starts their second all-reduces in different orders on gloo. Torch's
quantization_pertensor_hook fails on gloo, whose all-gathers return other futures than those of
NCCL."""
SENT: contest.Column = ("bytes sent", "sent_bytes", bytes_text)
LOSS: contest.Column = ("loss", "loss", "{:.4g}".format)


class Sizes(NamedTuple):
    """Sizes of a network that learns to imitate another one, and of the compressors."""

    rows: int = 64
    width: int = 512
    layers: int = 6
    rank: int = 4
    fraction: float = 0.01
    steps: int = 60
    bucket_mib: float = 64.0  # so large that a single bucket suffices


# Torch's hooks. A lesson's class makes ours from functions that reduce a flat gradient.

TORCHS = {PLAIN: allreduce_hook, FP16: fp16_compress_hook}
NAMES = (OUR_POWER_SGD, OUR_TOP_K, OUR_INT8, OUR_SIGN, PLAIN, FP16, POWER_SGD)


def hook_of(name: str, lesson: Lesson, module: nn.Module, sizes: Sizes) -> tuple[object, Any]:
    """Return a contestant's state and hook, the arguments of ``register_comm_hook``."""
    if name == POWER_SGD:
        state = PowerSGDState(None, sizes.rank, start_powerSGD_iter=2, min_compression_rate=1)
        return state, powerSGD_hook
    if name in TORCHS:
        return None, TORCHS[name]
    return None, lesson("comm_hook").CompressionHook(module, _reduce(name, lesson, sizes))


def _reduce(name: str, lesson: Lesson, sizes: Sizes) -> Callable[[Tensor, Any], Any]:
    """Return a function that averages a gradient in compressed form."""
    if name == OUR_POWER_SGD:
        power_sgd: Callable[[Tensor, Any], Any] = lesson("power_sgd").PowerSGD(sizes.rank)
        return power_sgd
    compression = lesson("gradient_compression")
    if name == OUR_TOP_K:
        return lambda gradient, _: compression.top_k(gradient, sizes.fraction)
    codec = compression.Int8() if name == OUR_INT8 else compression.Sign()
    return lambda gradient, _: compression.quantized(gradient, codec)


# Measurements


def measure(lesson: Lesson, sizes: Sizes, repeats: int) -> dict[str, Measured]:
    """Train all contestants on this rank's batches, then time their steps in turns."""
    contestants, counts, results = {}, {}, {}
    for name in NAMES:
        contestant = contestants[name] = _contestant(lesson, name, sizes)
        for _ in range(sizes.steps):
            loss = contestant.run()
        with counted_calls() as calls:
            contestant.run()
        counts[name] = {"collectives": calls.calls, "collective_bytes": calls.num_bytes}
        results[name] = {"sent_bytes": calls.sent_bytes, "loss": _mean(loss or 0.0)}
    measured = contest.timed(contestants, counts, repeats)
    return {name: {**row, **results[name]} for name, row in measured.items()}


def _contestant(lesson: Lesson, name: str, sizes: Sizes) -> Contestant:
    """Return a contestant that trains with its hook; all contestants start from equal weights."""
    torch.manual_seed(0)
    teacher, module = _model(sizes), _model(sizes)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(sizes.rows, sizes.width)
    y = teacher(x).detach()
    ddp: Any = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=sizes.bucket_mib)
    ddp.register_comm_hook(*hook_of(name, lesson, module, sizes))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def step() -> float:
        loss: Tensor = (ddp(x) - y).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return Contestant(module, step)


def _model(sizes: Sizes) -> nn.Sequential:
    pairs = [(nn.Linear(sizes.width, sizes.width), nn.Tanh()) for _ in range(sizes.layers)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def _mean(loss: float) -> float:
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@dataclass
class Calls:
    """Counts for a rank's collectives: calls, tensor bytes, and bytes that a ring would send."""

    calls: int = 0
    num_bytes: int = 0
    sent_bytes: float = 0.0


@contextmanager
def counted_calls() -> Iterator[Calls]:
    """Count the hooks' collectives in all threads: torch's hooks continue in backend threads."""
    total, n = Calls(), dist.get_world_size()
    sent = {  # collective -> (argument, multiple of its bytes that is sent)
        "all_reduce": ("tensor", 2 * (n - 1) / n),
        "all_gather": ("tensor", n - 1),
        "all_gather_into_tensor": ("input_tensor", n - 1),
        "reduce_scatter_tensor": ("input", (n - 1) / n),
        "all_to_all_single": ("input", (n - 1) / n),
    }
    originals: Mapping[str, Any] = {name: getattr(dist, name) for name in sent}

    def counting(name: str) -> Callable[..., Any]:
        signature = inspect.signature(originals[name])

        def call(*args: Any, **kwargs: Any) -> Any:
            argument, factor = sent[name]
            num_bytes = signature.bind(*args, **kwargs).arguments[argument].nbytes
            total.calls += 1
            total.num_bytes += num_bytes
            total.sent_bytes += factor * num_bytes
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield total
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


CONTEST = Contest(
    "compression",
    ("4.9", "4.11", "4.12", "4.13"),
    RIVALS,
    Sizes(),
    lambda sizes, ranks, repeats: (
        f"{sizes.layers} layers on {counted(ranks, 'gloo rank')}, r = {sizes.rank}: "
        f"median of {repeats} steps, loss after {sizes.steps}"
    ),
    measure,
    ((contest.STEP, contest.COLLECTIVES, SENT, LOSS),),
    (NOTES, contest.PARENTHESES),
)
