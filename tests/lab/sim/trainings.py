"""Training programs built from torch's parallel modules, for both simulated and real ranks.

They compute in float64 unless they say otherwise. On two ranks, results must agree to the last bit,
because the sum of two numbers is the same in either order. On four ranks, gloo and the simulated
cluster add in different orders.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from programs import me, size
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from zero_redundancy import ZeroRedundancyOptimizer

Program = Callable[[], object]
State = dict[str, Tensor]

TRAININGS: dict[str, Program] = {}
WIDTH, BATCH, STEPS = 6, 4, 3


def training(program: Program) -> Program:
    """Add a program to ``TRAININGS``."""
    TRAININGS[program.__name__] = program
    return program


def all_trainings() -> dict[str, object]:
    """Run all programs in one world, one after another; return their results by name."""
    warnings.simplefilter("ignore")
    return {name: program() for name, program in TRAININGS.items()}


def numbers(*shape: int, seed: int) -> Tensor:
    """Return random numbers that depend on the seed alone, not on the world's generators."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layers(depth: int = 3) -> nn.Sequential:
    """Return linear layers, each followed by an activation, with the same weights on every rank."""
    modules: list[nn.Module] = []
    for k in range(depth):
        linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(numbers(WIDTH, WIDTH, seed=k))
            linear.bias.copy_(numbers(WIDTH, seed=k + 100))
        modules += [linear, nn.Tanh()]
    return nn.Sequential(*modules)


def batches(count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's inputs and targets for each step."""
    for step in range(count):
        seed = 1000 * (1 + me()) + 2 * step
        yield numbers(BATCH, WIDTH, seed=seed), numbers(BATCH, WIDTH, seed=seed + 1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], State]:
    """Train for a few steps; return the losses and the final state."""
    losses = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, state_of(model)


def state_of(model: nn.Module) -> State:
    """Return every parameter and buffer in full, even if the model is sharded."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


# --- DistributedDataParallel ---------------------------------------------------------------------

SMALL_BUCKETS = 8 * WIDTH * WIDTH / 2**20  # MiB; one bucket per layer


@training
def ddp_with_several_buckets() -> object:
    model = DistributedDataParallel(layers(), bucket_cap_mb=SMALL_BUCKETS)
    return trained(model, momentum(model))


class Branches(nn.Module):
    """Three layers: ranks alternate between the first two at each step, and never use the third."""

    def __init__(self) -> None:
        super().__init__()
        self.branches, self.steps = layers(3)[::2], 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.branches[(me() + self.steps) % 2](x)


@training
def ddp_finds_unused_parameters() -> object:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    return trained(model, momentum(model))


@training
def ddp_with_communication_hooks() -> object:
    results = []
    for hook in (
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
    ):
        model = layers()[::2].float()  # linear layers only, so integers give integer gradients
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sign_()
        model = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS / 2)
        model.register_comm_hook(None, hook)
        inputs, targets = (tensor.sign().float() for tensor in next(batches()))
        (model(inputs) * targets).sum().backward()
        results.append([p.grad for p in model.parameters()])
    return results


@training
def ddp_joins_uneven_inputs() -> object:
    states = []
    for by_all_ranks in (True, False):
        model = DistributedDataParallel(layers(2))
        optimizer = momentum(model)
        with model.join(divide_by_initial_world_size=by_all_ranks):
            for inputs, targets in batches(1 + me() % 2):
                mse_loss(model(inputs), targets).backward()
                optimizer.step()
        states.append(state_of(copy.deepcopy(model)))  # it keeps no handle of its last step
    return states


# --- shards of states, parameters and tensors ----------------------------------------------------


@training
def zero_redundancy_optimizer() -> object:
    model = DistributedDataParallel(layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    result = trained(model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    steps = optimizer.state_dict()["state"] if me() == 0 else {}
    return result, {k: state["exp_avg"] for k, state in steps.items()}


def fully_sharded(model: nn.Sequential, **settings: Any) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **settings)
    return fully_shard(model, **settings)


@training
def fsdp_reshards_or_not() -> object:
    results = []
    for reshard in (True, False):
        mesh = init_device_mesh("cpu", (size(),))
        model = fully_sharded(layers(), mesh=mesh, reshard_after_forward=reshard)
        results.append(trained(model, torch.optim.Adam(model.parameters(), lr=0.1)))
    return results


@training
def fsdp_in_mixed_precision_over_two_dims() -> object:
    rows = 2 if size() > 2 else 1
    mesh = init_device_mesh("cpu", (rows, size() // rows), mesh_dim_names=("replicas", "shards"))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    model = fully_sharded(layers(), mesh=mesh, mp_policy=policy)
    inputs, targets = next(batches())
    mse_loss(model(inputs.float()).double(), targets).backward()
    return [p.grad.full_tensor() for p in model.parameters()]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH * 2, dtype=torch.float64)
        self.up = nn.Linear(WIDTH * 2, 4 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(4 * WIDTH, WIDTH * 2, dtype=torch.float64)
        with torch.no_grad():
            for k, parameter in enumerate(self.parameters()):
                parameter.copy_(numbers(*parameter.shape, seed=k))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@training
def tensor_parallel_layers() -> object:
    mesh = init_device_mesh("cpu", (size(),))
    model = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = numbers(BATCH, WIDTH * 2, seed=7).requires_grad_()
    y = model(x)
    (y * y).sum().backward()
    whole = [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()
    ]
    return y.detach(), x.grad, whole


# --- pipelines -----------------------------------------------------------------------------------


def pipelined(schedule: Callable[..., Any], stages_per_rank: int, micro_batches: int) -> object:
    """Run two steps of a pipeline; return this rank's output, losses and gradients in each."""
    num_stages = size() * stages_per_rank
    all_layers = layers(num_stages)
    mine = [
        PipelineStage(all_layers[2 * k : 2 * k + 2], k, num_stages, torch.device("cpu"))
        for k in range(me(), num_stages, size())
    ]
    run = schedule(mine if stages_per_rank > 1 else mine[0], micro_batches, loss_fn=mse_loss)
    inputs, targets = numbers(8, WIDTH, seed=1), numbers(8, WIDTH, seed=2)
    results: list[object] = []
    for _ in range(2):
        losses: list[Tensor] = []
        if me() == size() - 1:
            output = run.step(*([inputs] if size() == 1 else []), target=targets, losses=losses)
        else:
            output = run.step(*([inputs] if me() == 0 else []))
        gradients = [p.grad.clone() for stage in mine for p in stage.submod.parameters()]
        results.append(
            (
                output.detach() if output is not None else None,
                [loss.item() for loss in losses],
                gradients,
            )
        )
    return results


training_schedules = {
    "pipeline_gpipe": (ScheduleGPipe, 1, 4),
    "pipeline_1f1b": (Schedule1F1B, 1, 4),
    "pipeline_interleaved_1f1b": (ScheduleInterleaved1F1B, 2, 4),
}
TRAININGS |= {name: partial(pipelined, *how) for name, how in training_schedules.items()}
