"""Compressed gradients of Phase 4 in torch's DistributedDataParallel, beside torch's own hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from distlab import chosen, launch
from distlab.bench import rivals, rivals_record
from distlab.bench.rivals import Column, Contestant, Measured
from distlab.grade.submission import Submission
from distlab.util.text import bytes_text, counted

TASKS = ("4.9", "4.11", "4.12", "4.13")
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


class Sizes(NamedTuple):
    """Of a network that learns what another one computes, and of the compressors."""

    rows: int = 64
    width: int = 512
    layers: int = 6
    rank: int = 4
    fraction: float = 0.01
    steps: int = 60
    bucket_mib: float = 64.0  # one bucket


SIZES = Sizes()
PHASE = "phase4_production"


@dataclass(frozen=True)
class Compressed(Measured):
    """A step, and what so many of them have led to.

    Attributes:
        sent_bytes: by one rank in a step.
        loss: after all steps, the mean over the ranks.
    """

    sent_bytes: float
    loss: float


SENT: Column[Compressed] = ("bytes sent", lambda found: found.sent_bytes, bytes_text)
LOSS: Column[Compressed] = ("loss", lambda found: found.loss, "{:.4g}".format)
COLUMNS: tuple[Column[Compressed], ...] = (rivals.STEP, rivals.COLLECTIVES, SENT, LOSS)
Reduce = Callable[[Tensor, Any], Any]  # as phase4_production/given.py has it
Register = Callable[[Any, nn.Module, Any, Sizes], None]  # lessons, module, ddp, sizes


def _torchs(hook: Callable[..., Any]) -> Register:
    return lambda lessons, module, ddp, sizes: ddp.register_comm_hook(None, hook)


def _torchs_power_sgd(lessons: Any, module: nn.Module, ddp: Any, sizes: Sizes) -> None:
    state = PowerSGDState(None, sizes.rank, start_powerSGD_iter=2, min_compression_rate=1)
    ddp.register_comm_hook(state, powerSGD_hook)


def _our_power_sgd(lessons: Any, sizes: Sizes) -> Reduce:
    reduce: Reduce = chosen.lesson(lessons, "power_sgd").PowerSGD(sizes.rank)
    return reduce


def _our_top_k(lessons: Any, sizes: Sizes) -> Reduce:
    lesson: Any = chosen.lesson(lessons, "gradient_compression")
    return lambda gradient, _: lesson.top_k(gradient, sizes.fraction)


def _our_codec(name: str) -> Callable[[Any, Sizes], Reduce]:
    def make(lessons: Any, sizes: Sizes) -> Reduce:
        lesson: Any = chosen.lesson(lessons, "gradient_compression")
        return lambda gradient, _: lesson.quantized(gradient, getattr(lesson, name)())

    return make


OUR_REDUCES: dict[str, Callable[[Any, Sizes], Reduce]] = {
    OUR_POWER_SGD: _our_power_sgd,
    OUR_TOP_K: _our_top_k,
    OUR_INT8: _our_codec("Int8"),
    OUR_SIGN: _our_codec("Sign"),
}


def _ours(make_reduce: Callable[[Any, Sizes], Reduce]) -> Register:
    def register(lessons: Any, module: nn.Module, ddp: Any, sizes: Sizes) -> None:
        lesson: Any = chosen.lesson(lessons, "comm_hook")
        reduce = make_reduce(lessons, sizes)
        ddp.register_comm_hook(None, lesson.CompressionHook(module, reduce))

    return register


CONTESTANTS: dict[str, Register] = {
    **{name: _ours(make_reduce) for name, make_reduce in OUR_REDUCES.items()},
    PLAIN: _torchs(allreduce_hook),
    FP16: _torchs(fp16_compress_hook),
    POWER_SGD: _torchs_power_sgd,
}


def print_table(ranks: int, repeats: int, impl: str, folder: Path | None = None) -> None:
    """Train a model in all ways; print, and if wanted save, what a step needs and the loss.

    Args:
        ranks: two or more.
        repeats: timed steps of each way.
        impl: "solution" or "mine".
        folder: where to save all figures and a picture.

    Raises:
        NotThereError: there are no solutions here, or one of the functions is a TODO.
        LearnerError: ``impl`` is "mine" outside of the course's folder.
        LaunchError: a rank failed.
    """
    lessons = chosen.find(impl, TASKS)
    measured, *_ = launch.run(measure_on_rank, ranks, lessons, SIZES, repeats, backend="gloo")
    where = f"{SIZES.layers} layers on {counted(ranks, 'gloo rank')}, r = {SIZES.rank}"
    title = f"{where}: median of {repeats} steps, loss after {SIZES.steps}"
    Console().print(rivals.table(title, measured, RIVALS, COLUMNS))
    print(rivals.WHOSE[impl], NOTES, rivals.PARENTHESES, sep="\n")
    if folder is not None:
        arguments = {"ranks": ranks, "repeats": repeats, "impl": impl, **SIZES._asdict()}
        rivals_record.save(folder, "compression", title, measured, RIVALS, COLUMNS, arguments)


def measure_on_rank(lessons: Submission, sizes: Sizes, repeats: int) -> dict[str, Compressed]:
    """Train all contestants on the batches of this rank, and then time their steps in turn."""
    contestants, sent, losses, counts = {}, {}, {}, []
    for name, register in CONTESTANTS.items():
        contestant = contestants[name] = _contestant(lessons, register, sizes)
        for _ in range(sizes.steps):
            loss = contestant.run()
        with counted_calls() as calls:
            contestant.run()
        sent[name], losses[name] = calls.sent_bytes, _mean(loss or 0.0)
        counts.append((0, calls.calls, calls.num_bytes))
    found = rivals.timed(contestants, counts, repeats)
    return {
        name: Compressed(**asdict(one), sent_bytes=sent[name], loss=losses[name])
        for name, one in found.items()
    }


def _contestant(lessons: Submission, register: Register, sizes: Sizes) -> Contestant:
    """Return a model that learns with one of the hooks, always from the same start."""
    torch.manual_seed(0)
    teacher, module = _model(sizes), _model(sizes)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(sizes.rows, sizes.width)
    y = teacher(x).detach()
    ddp = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=sizes.bucket_mib)
    register(lessons, module, ddp, sizes)
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
    """The collectives of a rank: how many, of which bytes, and sent over a ring."""

    calls: int = 0
    num_bytes: int = 0
    sent_bytes: float = 0.0


@contextmanager
def counted_calls() -> Iterator[Calls]:
    """Count what hooks call, in whichever thread: torch's go on in those of the backend."""
    found, n = Calls(), dist.get_world_size()
    sent = {  # which argument, and how many times its bytes
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
            found.calls += 1
            found.num_bytes += num_bytes
            found.sent_bytes += factor * num_bytes
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
