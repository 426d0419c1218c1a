"""Data parallelism: each rank holds the whole model and sees a part of each batch."""

import inspect
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab import lessons
from distlab.production.errors import ConfigError
from distlab.production.lessons import Lessons
from distlab.production.states import Own
from distlab.production.strategies.base import Strategy
from distlab.production.types import Group, HasState
from distlab.production.world import WAIT_S
from distlab.shared_memory import SharedMemory

POWER_SGD_RANK = 4
ALL_REDUCES = {  # communication_pattern -> lesson, and its function
    "naive": ("collectives", "all_reduce_naive"),
    "recursive_doubling": ("collectives", "all_reduce_recursive_doubling"),
    "ring": ("ring_allreduce", "segmented_ring_all_reduce"),
    "tree": ("tree_allreduce", "double_binary_tree_all_reduce"),
}

# Each rank keeps its own buffers; an evaluation averages them. Newer versions of torch use
# another name for this option. Gradients are views of the buckets, so that nothing is copied back.
_KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
DDP_OPTIONS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False,
    "gradient_as_bucket_view": True,
}


class TorchDDP(Strategy):
    """torch's own DistributedDataParallel."""

    reorders_buckets = True
    ddp: Any

    def distribute(self, model: nn.Module) -> None:
        """Wrap the model; if configured, a hook compresses the gradients."""
        self.module = model
        self.ddp = self.called = DistributedDataParallel(model, **DDP_OPTIONS)
        self.hook = compression_hook(self)
        if self.hook:
            self.ddp.register_comm_hook(None, self.hook.__call__)
        self.make_optimizer()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss.

        torch waits for all buckets in a callback at the end of the backward pass. The callback here
        is called before it, because it is registered first, when all of this rank's own gradients
        are there.
        """
        with ExitStack() as stack:

            def begin(_: Tensor) -> None:
                wait = partial(stack.enter_context, self.waiting())
                lessons.given_3.at_end_of_backward(wait)

            loss.register_hook(begin)  # type: ignore[no-untyped-call]
            super().backward(loss)

    @contextmanager
    def accumulating(self, *, is_last: bool) -> Iterator[None]:
        """Send gradients, summed over all micro-batches, only with the last micro-batch."""
        if is_last:
            yield
            return
        with self.ddp.no_sync():
            yield

    def parts(self) -> Mapping[str, HasState]:
        """Add the residuals of the compression, which differ between ranks."""
        if not self.hook:
            return super().parts()
        place = f"rank {dist.get_rank()} of {dist.get_world_size()}:"
        return {**super().parts(), "compression": Own(self.hook, place, is_alone=True)}


class CourseDDP(TorchDDP):
    """The DistributedDataParallel of task 3.11, with an all-reduce of Phase 3."""

    def distribute(self, model: nn.Module) -> None:
        """Wrap the model with the all-reduce that ``communication_pattern`` names."""
        self.module = model
        self.hook = compression_hook(self)
        hook: Any = self.hook
        start = hook.all_reduce if hook else self._start_all_reduce()
        lesson = self.lessons("ddp")
        wrapped = lesson.DistributedDataParallel(model, all_reduce=start, group=self.replicas)
        self.ddp = self.called = wrapped
        self.make_optimizer()

    def _start_all_reduce(self) -> Any:
        given, all_reduce = lessons.given_3, all_reduce_of(self)
        return given.in_background(all_reduce) if all_reduce else given.start_all_reduce

    def average_gradients(self) -> None:
        """Wait for the last bucket."""
        self.ddp.finish_gradient_synchronization()

    def zero_grad(self) -> None:
        """Set the gradients to 0 in place, because they are views of the buckets."""
        self.optimizer.zero_grad(set_to_none=False)


class AfterBackward(Strategy):
    """Task 1.10: the gradients are averaged when the backward pass has ended."""

    def distribute(self, model: nn.Module) -> None:
        """Keep the model as it is."""
        super().distribute(model)
        self.all_reduce = all_reduce_of(self)

    def average_gradients(self) -> None:
        average_after_backward(self, self.all_reduce)


def average_after_backward(strategy: Strategy, all_reduce: Any) -> None:
    """Average all gradients, one by one or in one tensor."""
    average = strategy.lessons("trainer").AVERAGE_GRADIENTS[strategy.config.gradients]
    all_reduce = all_reduce or strategy.lessons("collectives").native_all_reduce
    average(strategy.module, all_reduce, strategy.replicas)


def all_reduce_of(strategy: Strategy) -> Any:
    """Return the all-reduce that ``communication_pattern`` names; it ends when the sum is there.

    None stands for torch's own, which needs no thread to run in the background.
    """
    pattern = strategy.config.communication_pattern
    if pattern == "native":
        return None
    if pattern == "hierarchical":
        return _hierarchical(strategy)
    if pattern == "shared_memory":
        return _in_shared_memory(strategy)
    if pattern == "auto":
        is_whole = strategy.num_replicas == dist.get_world_size() > 1
        with suppress(ConfigError):  # several hosts, or another backend
            on_cpus = strategy.device.type == "cpu" and is_whole
            return _in_shared_memory(strategy) if on_cpus else None
        return None
    lesson, name = ALL_REDUCES[pattern]
    return getattr(strategy.lessons(lesson), name)


def _in_shared_memory(strategy: Strategy) -> Any:
    timeout_s = max(strategy.config.heartbeat_timeout_s, WAIT_S)
    try:
        return SharedMemory(strategy.replicas, timeout_s=timeout_s).all_reduce
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"communication_pattern: shared_memory: {error}") from None


def _hierarchical(strategy: Strategy) -> Any:
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    inside, across = lessons.given_3.node_groups(hosts)
    lesson = strategy.lessons("topology")

    def all_reduce(x: Tensor, group: Group = None) -> None:
        lesson.hierarchical_all_reduce(x, inside, across)

    return all_reduce


def compression_hook(strategy: Strategy) -> Any:
    """Return the hook that compresses gradients with error feedback, or None if there is none."""
    config = strategy.config
    if config.compression == "none":
        return None

    hook = strategy.lessons("comm_hook").CompressionHook
    reduce = _reduce(config.compression, config.compression_ratio, strategy.lessons)
    return hook(strategy.module, reduce)


def _reduce(name: str, ratio: float, lesson: Lessons) -> Any:
    """Return a function that averages flat gradients in compressed form."""
    if name == "power_sgd":
        return lesson("power_sgd").PowerSGD(POWER_SGD_RANK)
    compression = lesson("gradient_compression")
    if name in ("int8", "sign"):
        codec = {"int8": compression.Int8, "sign": compression.Sign}[name]()
        return lambda gradient, _pieces: compression.quantized(gradient, codec)
    if name == "top_k":
        return lambda gradient, _pieces: compression.top_k(gradient, ratio)
    if name == "random_k":
        return _RandomK(compression.random_k, ratio)
    return lambda gradient, _pieces: compression.threshold(gradient, _least(gradient, ratio))


class _RandomK:
    """Selects random entries, the same on all ranks, even after a resume."""

    def __init__(self, random_k: Any, ratio: float) -> None:
        self.random_k, self.ratio = random_k, ratio
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, gradient: Tensor, _pieces: Any) -> Any:
        return self.random_k(gradient, self.ratio, self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def _least(gradient: Tensor, ratio: float) -> float:
    """Return the magnitude that a share ``ratio`` of normally distributed entries would exceed."""
    share = torch.tensor(1 - ratio, dtype=torch.float64).clamp(max=1 - 1e-9)
    deviation = float(gradient.norm()) / max(gradient.numel(), 1) ** 0.5
    quantile: Tensor = torch.special.ndtri((1 + share) / 2)
    return float(deviation * quantile)
