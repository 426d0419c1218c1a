"""Functions that benchmarks/methods.py runs on every rank, in simulation and in real processes.

Each returns one number. Times and memory are given as ratios, to be compared with a formula.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from phase2_advanced import programs
from phase2_advanced.given import MLP, Block, LossSum, Schedule, cross_entropy_sum
from solutions.phase2_advanced import gradient_accumulation as accumulation
from solutions.phase2_advanced import mixed_precision, model_parallel, tensor_parallel
from solutions.phase2_advanced import pipeline_parallel as pipeline
from solutions.phase2_advanced.activation_checkpointing import checkpoint_sequential

REPEATS = 9
LAYERS, WIDTH, ROWS, MICRO_BATCHES, CHUNKS, SEGMENTS = 16, 256, 1024, 8, 2, 4
TARGETS, VOCABULARY = 512, 4096


# --- measurements --------------------------------------------------------------------------------


def kept_by(model: nn.Module, step: Callable[[], Any]) -> int:
    """Return the peak number of bytes that a step keeps for its backward pass, weights excluded."""
    meter = programs.Meter([model])
    with meter.step():
        step()
    return meter.peak_bytes


def times_of(*steps: Callable[[], Any]) -> list[float]:
    """Run steps in turns; return the median seconds of each on the slowest rank."""
    seconds: list[list[float]] = [[] for _ in steps]
    for repeat in range(REPEATS + 1):
        for row, step in zip(seconds, steps, strict=True):
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            if repeat:  # the first round is only a warm-up
                row.append(time.perf_counter() - start)
    return [statistics.median(row) for row in seconds]


def ratio(steps: list[float]) -> float:
    """Return the first step's figure as a multiple of the second's."""
    return steps[0] / steps[1]


def deep() -> nn.Sequential:
    """Return a model with 16 layers of 256 x 256, identical on all ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pairs = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
    return nn.Sequential(*pairs)


def rows() -> tuple[Tensor, Tensor]:
    """Return a batch for ``deep``."""
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH), torch.randint(WIDTH, (ROWS,))


# --- the methods ---------------------------------------------------------------------------------


def accumulate() -> float:
    """Return the activation memory with eight micro-batches, relative to one whole batch."""
    model, batch = deep(), rows()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(size: int) -> int:
        return kept_by(model, lambda: accumulation.accumulate_step(model, sgd, batch, size))

    return step(ROWS // MICRO_BATCHES) / step(ROWS)


def accumulate_over_ranks() -> float:
    """Count the all-reduces of gradients in a step of eight micro-batches."""
    model, batch = deep(), rows()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with programs.calls_of(dist.all_reduce) as calls:
        accumulation.accumulate_step_over_ranks(model, sgd, batch, ROWS // MICRO_BATCHES)
    return float(sum(call["tensor"].numel() > 1 for call in calls))  # the other counts the targets


def mixed() -> float:
    """Return the activation memory in bfloat16, relative to float32."""
    model, batch = deep(), rows()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(loss_sum: LossSum) -> int:
        scaler = mixed_precision.LossScaler(1.0)
        return kept_by(
            model,
            lambda: mixed_precision.mixed_precision_step(
                model, sgd, scaler, batch, dtype=torch.bfloat16, loss_sum=loss_sum
            ),
        )

    def in_float32(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return cross_entropy_sum.sum_of(model, batch)

    return step(cross_entropy_sum) / step(replace(cross_entropy_sum, sum_of=in_float32))


def _step_in_segments(segments: int) -> tuple[nn.Module, Callable[[], None]]:
    model, (inputs, _) = deep(), rows()
    x = inputs.requires_grad_()
    if not segments:
        return model, lambda: model(x).sum().backward()
    return model, lambda: checkpoint_sequential(list(model), segments, x).sum().backward()


def checkpoint_time() -> float:
    """Return how many times as long a step takes with checkpoints, which repeat forward passes."""
    return ratio(times_of(_step_in_segments(SEGMENTS)[1], _step_in_segments(0)[1]))


def checkpoint_memory() -> float:
    """Return checkpointing's memory, four inputs and four layers, relative to that of 16 layers."""
    return kept_by(*_step_in_segments(SEGMENTS)) / kept_by(*_step_in_segments(0))


def in_stages() -> float:
    """Return the time relative to one process: about 1, because only one rank works at a time."""
    model, (inputs, targets) = deep(), rows()
    half = LAYERS // 2 * dist.get_rank()
    runner = model_parallel.StageRunner(model[half : half + LAYERS // 2])

    def step() -> None:
        output = runner.forward(inputs) if not half else runner.forward()
        is_last = isinstance(output, Tensor)
        runner.backward(cross_entropy(output, targets) if is_last else None)

    def alone() -> None:
        cross_entropy(model(inputs), targets).backward()

    return ratio(times_of(step, lambda: None if half else alone()))


def _micro_batches() -> list[tuple[Tensor, Tensor]]:
    """Return eight micro-batches; their inputs require gradients, so all layers do equal work."""
    parts = (part.chunk(MICRO_BATCHES) for part in rows())
    return [
        (inputs.clone().requires_grad_(), targets) for inputs, targets in zip(*parts, strict=True)
    ]


def _pipeline(schedule: Schedule, num_chunks: int = 1) -> tuple[nn.Module, Callable[[], Any]]:
    """Return the model, and a step that runs this rank's chunks of it."""
    model, batches = deep(), _micro_batches()
    size = LAYERS // (2 * num_chunks)
    starts = [(2 * chunk + dist.get_rank()) * size for chunk in range(num_chunks)]
    chunks = [model[start : start + size] for start in starts]
    return model, lambda: pipeline.run_schedule(schedule, chunks, batches, cross_entropy_sum)


def _pipeline_time(schedule: Schedule, num_chunks: int = 1) -> float:
    """Return a pipeline step's time as a multiple of the time that rank 0 needs alone."""
    model, step = _pipeline(schedule, num_chunks)
    batches = _micro_batches() if dist.get_rank() == 0 else []

    def alone() -> None:
        for batch in batches:
            cross_entropy_sum(model, batch)[0].backward()

    return ratio(times_of(step, alone))


def gpipe() -> float:
    """Return GPipe's time relative to one process: about half, plus the bubble."""
    return _pipeline_time(pipeline.gpipe_schedule(2, MICRO_BATCHES))


def one_f_one_b() -> float:
    """Return 1F1B's activation memory (two micro-batches in flight) relative to GPipe's (eight)."""
    schedules = (
        make(2, MICRO_BATCHES) for make in (pipeline.one_f_one_b_schedule, pipeline.gpipe_schedule)
    )
    return ratio([float(kept_by(*_pipeline(schedule, 1))) for schedule in schedules])


def interleaved() -> float:
    """Return the time with two chunks per rank, which halve the bubble, relative to one process."""
    return _pipeline_time(pipeline.interleaved_schedule(2, MICRO_BATCHES, CHUNKS), CHUNKS)


def mlp() -> float:
    """Return the time of an MLP split over two ranks, relative to one rank."""
    torch.set_num_threads(1)
    full, split, x = MLP(WIDTH), MLP(WIDTH), torch.randn(1, ROWS, WIDTH, requires_grad=True)
    tensor_parallel.parallelize_mlp(split)
    alone = full if dist.get_rank() == 0 else nn.Identity()
    return ratio(times_of(lambda: split(x).sum().backward(), lambda: alone(x).sum().backward()))


def attention() -> float:
    """Count the all-reduces in the forward and backward pass of an attention module."""
    block = Block(WIDTH, 8).attention
    tensor_parallel.parallelize_attention(block)
    x = torch.randn(1, ROWS, WIDTH, requires_grad=True)
    with programs.calls_of(dist.all_reduce) as calls:
        block(x).sum().backward()
    return float(len(calls))


def vocabulary() -> float:
    """Return how many values per target are all-reduced: three, rather than all its logits."""
    logits = torch.randn(TARGETS, VOCABULARY // dist.get_world_size(), requires_grad=True)
    targets = torch.randint(VOCABULARY, (TARGETS,))
    dist.broadcast(targets, 0)
    with programs.calls_of(dist.all_reduce) as calls:
        tensor_parallel.vocab_parallel_cross_entropy(logits, targets)
    return float(sum(call["tensor"].numel() for call in calls) / TARGETS)


def sequence() -> float:
    """Return the activation memory of norms that are split by position, relative to whole norms."""
    num_ranks = dist.get_world_size()
    positions = (ROWS, ROWS // num_ranks)
    return _kept_by_norms(True, positions[1]) / _kept_by_norms(False, positions[0])


def _kept_by_norms(is_split: bool, num_positions: int) -> int:
    block = Block(WIDTH, 8)
    if is_split:
        tensor_parallel.parallelize_block(block)
    meter = programs.Meter([block])
    for norm in (m for m in block.modules() if isinstance(m, nn.LayerNorm)):
        norm.forward = _watched(norm.forward, meter)  # type: ignore[method-assign]
    block(torch.randn(1, num_positions, WIDTH)).sum().backward()
    return meter.peak_bytes


def _watched(
    forward: Callable[[Tensor], Tensor], meter: programs.Meter
) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with meter.step():
            return forward(x)

    return run
