"""Simulate a step of the trainer's strategies on a cluster, with meta tensors."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from distlab.production.config import Config
from distlab.production.errors import ConfigError
from distlab.production.lessons import Lessons, find_lessons
from distlab.production.models import build_model
from distlab.production.optimization import ModelMean
from distlab.production.samples import blank, of_predictions
from distlab.production.strategies import parallelise
from distlab.production.strategies.base import DTYPES
from distlab.sim import Cluster, Event, Options, simulate

META = torch.device("meta")
OVERLAP_COST = 0.15  # the usual value in distlab.sim
STEPS = 2  # the first one creates the optimizer state


class Step(NamedTuple):
    """Time and memory of a step.

    Attributes:
        strategy: Name of the simulated strategy.
        step_s: Duration of the step.
        exposed_s: Time for which a GPU waits for communication, averaged over all GPUs.
        evaluation_s: Duration of the forward pass of an evaluation batch.
        peak_bytes: Peak memory of the GPU with the largest peak.
        peak_by_category: Bytes at that peak, by category.
        forward_flops: FLOPs of the forward pass for one sample.
    """

    strategy: str
    step_s: float
    exposed_s: float
    evaluation_s: float
    peak_bytes: int
    peak_by_category: dict[str, int]
    forward_flops: float


class _Times(NamedTuple):
    """Start and end of a rank's last step, and the end of its evaluation."""

    begin_s: float
    end_s: float
    evaluated_s: float


def simulated_step(config: Config, cluster: Cluster, side: int, num_classes: int) -> Step:
    """Simulate steps of a recipe on all GPUs of a cluster, with images of one size.

    Raises:
        ConfigError: The recipe uses a feature that needs tensors with real values.
        SimulationError: The recipe fails, or does not fit into memory.
    """
    name, simulated = _stand_in(config)
    lessons = find_lessons("solution", simulated)
    arguments = (simulated, lessons, side, num_classes)
    options = Options(overlap_cost=OVERLAP_COST)
    simulation = simulate(
        _train_on_rank, cluster.num_gpus, *arguments, cluster=cluster, options=options
    )
    times: Sequence[_Times] = simulation.results
    begin_s, end_s = (max(by_rank) for by_rank in list(zip(*times, strict=True))[:2])
    fullest = max(range(len(times)), key=simulation.trace.peak_bytes.__getitem__)
    return Step(
        name,
        end_s - begin_s,
        _exposed(simulation.trace.events, times),
        max(t.evaluated_s - t.end_s for t in times),
        simulation.trace.peak_bytes[fullest],
        simulation.trace.peak_by_category[fullest],
        _forward_flops(simulated, lessons, side, num_classes),
    )


def _exposed(events: Sequence[Event], times: Sequence[_Times]) -> float:
    """Return how long a rank waits during its last step, averaged over all ranks."""
    waited = [0.0] * len(times)
    for event in events:
        begin_s, end_s, _ = times[event.rank]
        if event.kind == "wait" and begin_s <= event.start_s < end_s:
            waited[event.rank] += event.end_s - event.start_s
    return mean(waited)


def _stand_in(config: Config) -> tuple[str, Config]:
    """Return the name and the configuration of a similar strategy that works on meta tensors.

    Two strategies need a stand-in: torch's DistributedDataParallel, which in its second step reads
    its bucket order from a tensor, and the course's ZeRO stage 3, which needs values to shard.
    """
    _refuse(config)
    stage, pattern = config.zero_redundancy, config.communication_pattern
    precision = "bf16" if config.precision == "fp16" else config.precision
    changed: dict[str, Any] = {
        "precision": precision,
        "compile": False,
        "sharding_strategy": "manual",
        "channels_last": False,  # no effect on the simulated costs
    }
    if config.strategy == "ddp":
        name, changed["strategy"] = "ddp, with the course's buckets", "course"
    elif stage == 3:
        name = "course, ZeRO 3, by torch's fully_shard"
        changed |= {"strategy": "fsdp", "zero_redundancy": 0}
    elif config.strategy == "fsdp":
        name = "fsdp"
    else:
        name = f"course, {f'ZeRO {stage}, ' if stage else ''}{pattern}"
    return name, config.model_copy(update=changed)


def _refuse(config: Config) -> None:
    named = ["compression"] if config.compression != "none" else []
    named += [f"parallelism {config.parallelism}"] if config.splits_model else []
    if config.has_servers:
        named.append("communication_pattern: parameter_server")
    if named:
        raise ConfigError(f"{', '.join(named)}: a dry run predicts data parallelism and ZeRO alone")


# On a rank


def _train_on_rank(config: Config, lessons: Lessons, side: int, num_classes: int) -> _Times:
    model = _model(config, num_classes)
    strategy: Any = parallelise(model, config, _loss_sum, lessons)
    strategy.autocast = lambda: _Autocast(DTYPES[config.precision])  # torch's own ignores meta
    average = ModelMean(strategy.module, config.ema_decay)
    number = -(-config.batch_size // dist.get_world_size())
    with META:
        (inputs, targets), (test_inputs, _) = (
            blank(config, number, size) for size in (side, config.image_size)
        )
    strategy.warm_up(nullcontext)
    for _ in range(STEPS):
        begin_s = time.perf_counter()
        strategy.zero_grad()
        strategy.forward_backward(inputs, targets, config.batch_size)
        strategy.average_gradients()
        strategy.step()
        average.update()
    end_s = time.perf_counter()
    strategy.module.eval()
    with torch.no_grad(), strategy.autocast():
        strategy.predict(test_inputs)
    return _Times(begin_s, end_s, time.perf_counter())


def _model(config: Config, num_classes: int) -> nn.Module:
    with META:
        return build_model(config, num_classes, META)


def _loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(*of_predictions(logits, targets), reduction="sum")


def _forward_flops(config: Config, lessons: Lessons, side: int, num_classes: int) -> float:
    model = _model(config, num_classes).eval()
    with META:
        sample, _ = blank(config, 1, side)
    count = lessons("monitoring").count_flops
    return float(count(lambda: model(sample)))


PRODUCTS = {
    torch.conv2d,
    torch.matmul,
    functional.linear,
    functional.multi_head_attention_forward,
    functional.scaled_dot_product_attention,
}


class _Autocast(TorchFunctionMode):
    """Replacement for torch.autocast on a GPU: matrix products in 16 bits, layer norms in 32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = self.dtype if func in PRODUCTS else None
        if func is functional.layer_norm:
            dtype = torch.float32
        if dtype is not None:
            args = [_cast(value, dtype) for value in args]
            kwargs = {key: _cast(value, dtype) for key, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_number = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_number else value
