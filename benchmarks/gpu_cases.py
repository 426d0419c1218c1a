"""Cases that call the solutions with tensors on any device; benchmarks/gpu.py runs them on a GPU.

A case prepares a call whose result should be the same on every device. All random numbers are
drawn on the CPU, so that the inputs are the same too.
"""

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from phase2_advanced.given import MLP, Block, cross_entropy_sum
from phase4_production.given import Piece
from solutions.phase1_data_parallel import collectives as by_hand
from solutions.phase1_data_parallel import data_loader, trainer
from solutions.phase2_advanced import activation_checkpointing as checkpointing
from solutions.phase2_advanced import gradient_accumulation as accumulation
from solutions.phase2_advanced import mixed_precision, model_parallel
from solutions.phase2_advanced import pipeline_parallel as pipeline
from solutions.phase2_advanced import tensor_parallel as tensors
from solutions.phase3_multi_node import ddp, topology, zero
from solutions.phase3_multi_node import ring_allreduce as ring
from solutions.phase3_multi_node import tree_allreduce as tree
from solutions.phase4_production import (
    checkpoint,
    comm_hook,
    fault_tolerance,
    monitoring,
    power_sgd,
    profiling,
    training_state,
)
from solutions.phase4_production import gradient_compression as compression

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(f"{ROOT}/{part}" for part in ("solutions/", "phase", "distlab/"))
ON_THE_CPU = tuple(  # files whose tensors stay there: numbers of steps, orders of samples
    str(Path(module.__file__ or "").parent) for module in (torch.optim, torch.utils.data)
)
CPU = torch.device("cpu")
Batch = tuple[Tensor, Tensor]
Call = Callable[[], Sequence[Tensor]]
Case = Callable[[torch.device], Call]


def numbers(device: torch.device, *shape: int, rank: int | None = None) -> Tensor:
    """Draw random numbers, different on each rank unless ``rank`` is given."""
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return torch.randn(shape, generator=generator).to(device)


def rows(device: torch.device, rank: int | None = None) -> Batch:
    """Return 32 inputs and their classes."""
    inputs = numbers(device, 32, 64, rank=rank)
    return inputs, inputs[:, :10].argmax(1)


def mlp(device: torch.device) -> nn.Sequential:
    """Return a model for ``rows``, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)


# Training steps, which gpu_training.py also times on a large model


Start = Callable[[nn.Module], tuple[nn.Module, Any, Callable[[], object]]]


def alone(model: nn.Module) -> Any:
    return model, torch.optim.AdamW(model.parameters()), lambda: None


def torchs_ddp(model: nn.Module) -> Any:
    return alone(nn.parallel.DistributedDataParallel(model))


def our_ddp(model: nn.Module, **options: Any) -> Any:
    parallel = ddp.DistributedDataParallel(model, **options)
    return *alone(parallel)[:2], parallel.finish_gradient_synchronization


def zero_1_or_2(model: nn.Module, kind: Any = zero.ShardedOptimizer) -> Any:
    optimizer = kind(model.parameters(), torch.optim.AdamW)
    return model, optimizer, optimizer.reduce_gradients


def zero_3(model: nn.Module, **options: Any) -> Any:
    return alone(zero.FullyShardedDataParallel(model, **options))


def step_of(start: Start, model: nn.Module, batch: Batch) -> Callable[[], Tensor]:
    """Return a function that takes a training step and returns the loss, still on the device."""
    parallel, optimizer, finish = start(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(parallel(batch[0]).flatten(0, -2), batch[1].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        finish()
        optimizer.step()
        return loss.detach()

    return step


def count_labels(batch: Batch) -> Tensor:
    """Return the number of targets in a tensor, as ``cross_entropy_sum.count`` does on a GPU."""
    return torch.count_nonzero(batch[1] != -100)


loss_sum = replace(cross_entropy_sum, count=count_labels)


# Cases


def started(start: Start) -> Case:
    """Return a case that runs a data-parallel step and returns its loss."""
    return lambda device: (lambda step: lambda: [step()])(step_of(start, mlp(device), rows(device)))


def trained(step: Callable[..., object]) -> Case:
    """Return a case that calls ``step`` and returns the updated parameters."""

    def case(device: torch.device) -> Call:
        model, batch = mlp(device), rows(device)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return lambda: (step(model, sgd, batch), [*model.parameters()])[1]

    return case


def on_numbers(use: Callable[[Tensor], Any]) -> Case:
    """Return a case that calls a collective, which works in place or returns its result."""

    def case(device: torch.device) -> Call:
        x = numbers(device, 10_000)
        return lambda: (lambda found: [x if found is None else found])(use(x))

    return case


def differentiated(
    make: Callable[[], nn.Module], *shape: int, use: Callable[[nn.Module], Any] = lambda m: m
) -> Case:
    """Return a case that computes the gradients of a module after ``use`` has parallelized it."""

    def case(device: torch.device) -> Call:
        torch.manual_seed(0)
        module, x = make().to(device), numbers(device, *shape, rank=0)
        parallel = use(module) or module

        def call() -> list[Tensor]:
            module.zero_grad()
            parallel(x).sum().backward()
            return [p.grad for p in module.parameters() if p.grad is not None]

        return call

    return case


def scatter(device: torch.device) -> Call:
    batch = rows(device) if dist.get_rank() == 0 else None
    return lambda: data_loader.scatter_batch(batch, device=device)


def exchange(x: Tensor) -> Tensor:
    rank, size, incoming = dist.get_rank(), dist.get_world_size(), torch.zeros_like(x)
    by_hand.exchange(x, (rank + 1) % size, incoming, (rank - 1) % size)
    return incoming


def broadcast_parameters(model: nn.Module, *_: object) -> None:
    trainer.broadcast_parameters(model)


def evaluate(device: torch.device) -> Call:
    model, data = mlp(device), TensorDataset(*rows(CPU, rank=0))
    options = {"batch_size": 8, "device": device}
    return lambda: [torch.tensor(trainer.evaluate(model, data, **options).loss)]


def own_stage(device: torch.device) -> nn.Module:
    """Return this rank's layer of a model that has one layer per rank."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(dist.get_world_size())]
    return layers[dist.get_rank()].to(device)


def in_stages(device: torch.device) -> Call:
    runner = model_parallel.StageRunner(own_stage(device))

    def call() -> list[Tensor]:
        output = runner.forward(*[numbers(device, 32, 64, rank=0)][: dist.get_rank() == 0])
        runner.backward(output.sum() if isinstance(output, Tensor) else None)
        return [p.grad for p in runner.stage.parameters() if p.grad is not None]

    return call


def in_a_pipeline(device: torch.device) -> Call:
    stage = own_stage(device)
    batches = [*zip(*(part.chunk(4) for part in rows(device, rank=0)), strict=True)]
    schedule = pipeline.one_f_one_b_schedule(dist.get_world_size(), len(batches))

    def call() -> list[Tensor]:
        pipeline.run_schedule(schedule, [stage], batches, loss_sum)
        return [p.grad for p in stage.parameters() if p.grad is not None]

    return call


def block(device: torch.device) -> Call:
    case = differentiated(
        *(lambda: Block(64, 4), 2, 16 // dist.get_world_size(), 64), use=tensors.parallelize_block
    )
    return case(device)


def vocabulary(device: torch.device) -> Call:
    logits = numbers(device, 32, 48 // dist.get_world_size()).requires_grad_()
    targets = numbers(device, 32, 48, rank=0).argmax(1)
    return lambda: [tensors.vocab_parallel_cross_entropy(logits, targets)]


def hierarchical(device: torch.device) -> Call:
    size = dist.get_world_size()
    groups = topology.node_groups([f"node{rank // max(size // 2, 1)}" for rank in range(size)])
    return on_numbers(lambda x: topology.hierarchical_all_reduce(x, *groups))(device)


def resumed(model: nn.Module, sgd: torch.optim.Optimizer, _batch: Batch) -> None:
    state = training_state.TrainingState({"model": model, "optimizer": sgd})
    state.load_state_dict(state.state_dict())


def saved(device: torch.device) -> Call:
    model, found = mlp(device), list[Tensor]()

    def call() -> list[Tensor]:
        with checkpoint.AsyncCheckpointer(lambda state, _: found.extend(state.values())) as saver:
            saver.save(model.state_dict(), 1)
        return found[-4:]

    return call


def hook(model: nn.Module) -> comm_hook.CompressionHook:
    return comm_hook.CompressionHook(model, lambda flat, _: compression.top_k(flat, 0.1))


def hooked(model: nn.Module) -> Any:
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel.register_comm_hook(None, hook(model))
    return alone(parallel)


def profiled(device: torch.device) -> Call:
    step, folder = CASES["3.11"](device), Path(tempfile.mkdtemp())
    run = partial(profiling.profile_steps, lambda _: step(), folder)
    return lambda: (profiling.exposed_communication(run()), [])[1]


CASES: dict[str, Case] = {  # the keys are task ids
    "1.5": scatter,
    "1.3": on_numbers(exchange),
    "1.4": on_numbers(by_hand.broadcast),
    "1.6": on_numbers(by_hand.all_reduce_naive),
    "1.7": on_numbers(by_hand.all_reduce_recursive_doubling),
    "1.9": trained(broadcast_parameters),
    "1.11": trained(trainer.train_step),
    "1.11 flat": trained(partial(trainer.train_step, average=trainer.average_gradients_flat)),
    "1.12": evaluate,
    "2.1": trained(lambda *step: accumulation.accumulate_step(*step, 8, loss_sum)),
    "2.2": trained(
        lambda *step: accumulation.accumulate_step_over_ranks(
            *step, 8, max_norm=1.0, loss_sum=loss_sum
        )
    ),
    "2.4": trained(
        lambda model, sgd, batch: mixed_precision.mixed_precision_step(
            *(model, sgd, mixed_precision.LossScaler(256.0), batch),
            dtype=torch.bfloat16,
            loss_sum=loss_sum,
        )
    ),
    "2.5": differentiated(
        lambda: mlp(CPU), 32, 64, use=lambda model: partial(checkpointing.checkpoint, model)
    ),
    "2.8": in_stages,
    "2.10": in_a_pipeline,
    "2.15": differentiated(lambda: MLP(64), 2, 16, 64, use=tensors.parallelize_mlp),
    "2.16": vocabulary,
    "2.17": block,
    "3.2": on_numbers(ring.ring_all_reduce),
    "3.3": on_numbers(partial(ring.segmented_ring_all_reduce, segment_bytes=4096)),
    "3.4": on_numbers(tree.tree_all_reduce),
    "3.5": on_numbers(tree.double_binary_tree_all_reduce),
    "3.7": hierarchical,
    "3.11": started(our_ddp),
    "3.12": started(zero_1_or_2),
    "3.13": started(partial(zero_1_or_2, kind=zero.ShardedGradientOptimizer)),
    "3.14": started(partial(zero_3, compute_dtype=torch.float32)),
    "4.2": trained(resumed),
    "4.4": saved,
    "4.7": on_numbers(lambda _: torch.tensor(fault_tolerance.StopRequest().agreed())),
    "4.9": on_numbers(lambda x: compression.top_k(x, 0.1).mean),
    "4.10": on_numbers(lambda x: compression.random_k(x, 0.1, torch.Generator()).mean),
    "4.10 threshold": on_numbers(lambda x: compression.threshold(x, 1.0).mean),
    "4.11": on_numbers(lambda x: compression.quantized(x, compression.Int8()).mean),
    "4.12": on_numbers(
        lambda x: power_sgd.PowerSGD(4)(x, [Piece("weight", torch.Size([100, 100]))]).mean
    ),
    "4.13": started(lambda model: our_ddp(model, all_reduce=hook(model).all_reduce)),
    "4.13 in torch's": started(hooked),
    "4.15": on_numbers(lambda _: torch.tensor(monitoring.throughput(8, 1.0))),
    "4.18": profiled,
}
MESSAGES = ("1.5", "1.3", "1.4", "1.6", "1.7", "2.8", "2.10", "3.2", "3.3", "3.4", "3.5")


# On every rank


def run_cases(names: Sequence[str], device_name: str) -> dict[str, dict[str, Any]]:
    """Run each case twice; return the second run's results, and the lines that made the host wait.

    If a case fails, its result is the error, and the next case still runs.
    """
    device, found = torch.device(device_name), dict[str, dict[str, Any]]()
    for name in names:
        try:
            call = CASES[name](device)
            call()
            with host_syncs(device) as sites:
                results = call()
            values = [result.detach().double().flatten().cpu() for result in results]
            found[name] = {"values": values, "syncs": {**sites}}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}".replace("\n", " ")[:300]}
    return found


@contextmanager
def host_syncs(device: torch.device) -> Iterator[Counter[str]]:
    """Count, by line of the course's code, the operations that make the host wait for the GPU.

    On the CPU, where nothing waits, the operations are counted that would wait on a GPU.
    """
    sites: Counter[str] = Counter()
    if device.type == "cpu":
        with Reads(sites), Readings(sites):
            yield sites
        return
    with warnings.catch_warnings():
        # Simulated ranks are threads, which would share the filters.
        if dist.get_backend() != "sim":
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_: _note_warning(f"{message}", sites)
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield sites
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Reads(TorchDispatchMode):
    """Counts operations whose result, or its size, the host has to know."""

    NAMES = tuple(
        f"aten.{name}"
        for name in (
            *("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount"),
            *("_unique", "unique_", "repeat_interleave.Tensor"),
        )
    )

    def __init__(self, sites: Counter[str]) -> None:
        super().__init__()
        self.sites = sites

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        has_mask = str(func).startswith(
            ("aten.index.", "aten.index_put", "aten._index_put")
        ) and any(index is not None and index.dtype == torch.bool for index in args[1])
        if has_mask or str(func).startswith(self.NAMES):
            _note(self.sites)
        return func(*args, **(kwargs or {}))


class Readings(TorchFunctionMode):
    """Counts conversions of whole tensors, which are no operations on the CPU."""

    def __init__(self, sites: Counter[str]) -> None:
        super().__init__()
        self.sites = sites

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.cpu, Tensor.numpy):
            _note(self.sites)
        return func(*args, **(kwargs or {}))


def _note_warning(warning: str, sites: Counter[str]) -> None:
    if "called a synchronizing" in warning:
        _note(sites)


def _note(sites: Counter[str]) -> None:
    frame, path = sys._getframe(1), ""
    while (caller := frame.f_back) and not path.startswith(OURS):
        if path.startswith(ON_THE_CPU):
            return
        frame, path = caller, caller.f_code.co_filename
    sites[f"{path.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"] += 1
