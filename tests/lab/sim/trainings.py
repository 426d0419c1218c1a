"""Training programs made of torch's own parallel modules, for simulated and for real ranks alike.

All compute in float64 unless they say otherwise. A sum over two ranks is exact in any order, so two
ranks must agree to the last bit; gloo adds four in another order than the simulated cluster.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from programs import me, size
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from solutions.phase1_data_parallel import collectives
from solutions.phase1_data_parallel.trainer import Trainer, train_step

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # it still uses it
    from torch.distributed.optim import ZeroRedundancyOptimizer

Program = Callable[[], object]
State = dict[str, Tensor]

TRAININGS: dict[str, Program] = {}
WIDTH, BATCH, STEPS = 6, 4, 3


def training(program: Program) -> Program:
    """Enter a program in the table of trainings."""
    TRAININGS[program.__name__] = program
    return program


def all_trainings() -> dict[str, object]:
    """What every program returns, by name; all in one world, one after the other."""
    warnings.simplefilter("ignore")
    return {name: program() for name, program in TRAININGS.items()}


def numbers(*shape: int, seed: int) -> Tensor:
    """Random numbers that depend on the seed alone, not on the world's generators."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layers(depth: int = 3) -> nn.Sequential:
    """The same linear layers on every rank, with activations between them."""
    modules: list[nn.Module] = []
    for k in range(depth):
        linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(numbers(WIDTH, WIDTH, seed=k))
            linear.bias.copy_(numbers(WIDTH, seed=k + 100))
        modules += [linear, nn.Tanh()]
    return nn.Sequential(*modules)


def batches(count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's inputs and targets."""
    for step in range(count):
        seed = 1000 * (1 + me()) + 2 * step
        yield numbers(BATCH, WIDTH, seed=seed), numbers(BATCH, WIDTH, seed=seed + 1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], State]:
    """Losses and state after a few steps."""
    losses = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, state_of(model)


def state_of(model: nn.Module) -> State:
    """Every parameter and buffer, whole, also of a model in shards."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


# --- DistributedDataParallel ---------------------------------------------------------------------

SMALL_BUCKETS = 8 * WIDTH * WIDTH / 2**20  # in MiB: a bucket for each layer


@training
def ddp_with_several_buckets() -> object:
    model = DistributedDataParallel(layers(), bucket_cap_mb=SMALL_BUCKETS)
    return trained(model, momentum(model))


@training
def ddp_starts_from_rank_0() -> object:
    model = layers()
    with torch.no_grad():
        model[0].weight += me()
    return trained(DistributedDataParallel(model), momentum(model))


@training
def ddp_accumulates_gradients() -> object:
    model = DistributedDataParallel(layers(), bucket_cap_mb=SMALL_BUCKETS)
    gradients = []
    *first, last = batches()
    with model.no_sync():
        for inputs, targets in first:
            mse_loss(model(inputs), targets).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
    mse_loss(model(last[0]), last[1]).backward()
    return gradients, [p.grad for p in model.parameters()]


class Branches(nn.Module):
    """Two layers of which each rank and step uses another one, and one that nobody uses."""

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
        model = layers()[::2].float()  # linear: of whole numbers, the gradients are whole numbers
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
def ddp_with_checkpointing() -> object:
    results = []
    for reentrant in (False, True):
        blocks = layers(4)

        class Checkpointed(nn.Module):
            def __init__(self, blocks: nn.Sequential, reentrant: bool) -> None:
                super().__init__()
                self.blocks, self.reentrant = blocks, reentrant

            def forward(self, x: Tensor) -> Tensor:
                for k in range(0, len(self.blocks), 2):
                    x = checkpoint(self.blocks[k : k + 2], x, use_reentrant=self.reentrant)
                return x

        model = DistributedDataParallel(Checkpointed(blocks, reentrant), static_graph=reentrant)
        inputs, targets = next(batches())
        mse_loss(model(inputs.requires_grad_()), targets).backward()
        results.append((inputs.grad, [p.grad for p in model.parameters()]))
    return results


@training
def ddp_with_buffers_and_dropout() -> object:
    """BatchNorm's statistics are those of rank 0; dropout draws from a generator of its own."""
    torch.manual_seed(me())
    model = nn.Sequential(layers(1), nn.BatchNorm1d(WIDTH, dtype=torch.float64), nn.Dropout(0.5))
    parallel = DistributedDataParallel(model)
    return trained(parallel, momentum(model))


@training
def ddp_joins_uneven_inputs() -> object:
    model = DistributedDataParallel(layers(2))
    optimizer = momentum(model)
    with Join([model]):
        for inputs, targets in batches(1 + me() % 2):
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return state_of(model)


@training
def synchronised_batch_norm_needs_a_gpu() -> object:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(WIDTH, dtype=torch.float64))
    try:
        return model(next(batches())[0])
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)


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
def fsdp_clips_gradients() -> object:
    model = fully_sharded(layers(), mesh=init_device_mesh("cpu", (size(),)))
    optimizer = momentum(model)
    norms = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
    return norms, state_of(model)


@training
def fsdp_accumulates_gradients() -> object:
    model = fully_sharded(layers(), mesh=init_device_mesh("cpu", (size(),)))
    pairs = list(batches())
    for k, (inputs, targets) in enumerate(pairs):
        model.set_requires_gradient_sync(k == len(pairs) - 1)
        mse_loss(model(inputs), targets).backward()
    return [p.grad.full_tensor() for p in model.parameters()]


@training
def fsdp_in_mixed_precision_over_two_dims() -> object:
    rows = 2 if size() > 2 else 1
    mesh = init_device_mesh("cpu", (rows, size() // rows), mesh_dim_names=("replicas", "shards"))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    model = fully_sharded(layers(), mesh=mesh, mp_policy=policy)
    inputs, targets = next(batches())
    mse_loss(model(inputs.float()).double(), targets).backward()
    return [p.grad.full_tensor() for p in model.parameters()]


@training
def tensors_are_redistributed() -> object:
    mesh = init_device_mesh("cpu", (size(),))
    whole = numbers(2 * size(), 3 * size(), seed=1)
    rows, columns, copies = [Shard(0)], [Shard(1)], [Replicate()]
    x = distribute_tensor(whole, mesh, rows)
    product = distribute_tensor(whole.t().contiguous(), mesh, rows)
    return [
        x.to_local(),
        x.redistribute(mesh, columns).to_local(),
        x.redistribute(mesh, copies).to_local(),
        x.sum(0).full_tensor(),
        (x.redistribute(mesh, columns) @ product).full_tensor(),
    ]


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


@training
def sequence_parallel_layers() -> object:
    mesh = init_device_mesh("cpu", (size(),))
    model = nn.Sequential(nn.LayerNorm(WIDTH, dtype=torch.float64), layers(1)[0])
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1))}
    x = numbers(2, 2 * size(), WIDTH, seed=8)
    y = parallelize_module(model, mesh, plan)(x.chunk(size(), dim=1)[me()])
    return y.detach()


# --- pipelines -----------------------------------------------------------------------------------


def pipelined(schedule: Callable[..., Any], stages_per_rank: int, micro_batches: int) -> object:
    """Train a pipeline for two steps; losses of the last stage and gradients of the own ones."""
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


# --- the solutions of phase 1 --------------------------------------------------------------------


@training
def phase1_collectives() -> object:
    results: dict[str, object] = {}
    right, left = (me() + 1) % size(), (me() - 1) % size()
    incoming = torch.zeros(5, dtype=torch.float64)
    if size() > 1:
        collectives.exchange(numbers(5, seed=me()), right, incoming, left)
    for src in range(size()):
        x = numbers(5, seed=me())
        collectives.broadcast(x, src)
        results[f"broadcast from {src}"] = x
    for name, all_reduce in collectives.ALL_REDUCES.items():
        x = numbers(7, seed=me())
        all_reduce(x, None)
        results[name] = x
    return incoming, results


@training
def phase1_train_step_with_every_all_reduce() -> object:
    results = {}
    for name, all_reduce in collectives.ALL_REDUCES.items():
        model = layers()
        optimizer = momentum(model)
        generator = torch.Generator().manual_seed(me())
        losses = [
            train_step(
                model,
                optimizer,
                (inputs[: 1 + me()], torch.randint(WIDTH, (1 + me(),), generator=generator)),
                all_reduce=all_reduce,
            )
            for inputs, _ in batches()
        ]
        results[name] = losses, state_of(model)
    return results


class Digits(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return numbers(WIDTH, seed=index), torch.tensor(index % WIDTH)


@training
def phase1_trainer_fits() -> object:
    model = layers()
    trainer = Trainer(model, momentum(model))
    history = trainer.fit(Digits(), Digits(), epochs=2, global_batch_size=8, seed=3)
    return [(r.epoch, r.step_losses, r.test_loss, r.test_accuracy) for r in history], state_of(
        model
    )
