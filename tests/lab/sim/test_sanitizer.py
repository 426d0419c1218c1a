"""``--sanitize`` names mistakes that end without an error, and nothing in right programs."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split
from zero_redundancy import ZeroRedundancyOptimizer

from distlab.sim import Options, SimulationError, simulate
from distlab.sim.sanitizer.against import Against, Reference


def findings(program: Callable[[], object], num_ranks: int = 2) -> list[str]:
    return simulate(program, num_ranks, options=Options(is_sanitized=True)).findings


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def data() -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))


def sgd(module: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=lr)


def average(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def train(
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    output: Callable[[], Tensor],
    *averaged: nn.Module,
) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        output().square().sum().backward()
        for module in averaged:
            average(module)
        optimizer.step()


# Wrong programs


def forgets_the_second_layer() -> None:
    net = model()
    net(data()).square().sum().backward()
    average(net[0])
    sgd(net).step()


def forgets_a_new_head() -> None:
    net = nn.Sequential(*model(), nn.Linear(2, 2))
    nn.init.ones_(net[3].weight)
    averaged = [*net.parameters()]
    net[3] = nn.Linear(2, 3)
    nn.init.normal_(net[3].weight, generator=torch.Generator().manual_seed(1))
    nn.init.zeros_(net[3].bias)
    net(data()).square().sum().backward()
    for parameter in averaged:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    sgd(net).step()


def averages_nothing() -> None:
    net = model()
    train(sgd(net), 3, lambda: net(data()))


def shares_out_the_update_but_averages_nothing() -> None:
    net = model()
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    train(optimizer, 3, lambda: net(data()))


def appends_a_layer_after_wrapping() -> None:
    net = model()
    ddp = DistributedDataParallel(net)
    torch.manual_seed(1)
    net.append(nn.Linear(2, 3))
    optimizer = sgd(net)
    ddp(data()).square().sum().backward()
    optimizer.step()


def loads_on_one_rank_after_wrapping() -> None:
    ddp = DistributedDataParallel(model())
    if dist.get_rank() == 0:
        ddp.module.load_state_dict(model(seed=1).state_dict())
    optimizer = sgd(ddp)
    ddp(data()).square().sum().backward()
    optimizer.step()


def wraps_without_a_broadcast() -> None:
    ddp = DistributedDataParallel(model(seed=dist.get_rank()), init_sync=False)
    optimizer = sgd(ddp)
    ddp(data()).square().sum().backward()
    optimizer.step()


def never_lets_gradients_be_averaged() -> None:
    net = model()
    fully_shard(net)
    optimizer = sgd(net)
    for _ in range(2):
        net.set_requires_gradient_sync(False)  # type: ignore[operator]
        net(data()).square().sum().backward()
        optimizer.step()


def averages_nothing_but_a_loss() -> None:
    averages_nothing()
    dist.all_reduce(torch.ones(1))


def splits_a_layer_between_batches() -> None:
    parallelizes(data())


def parallelizes(x: Tensor) -> None:
    mesh = init_device_mesh(x.device.type, (2,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model(), mesh, plan)(x)


def averages_one_of_two_models() -> None:
    """Only the discriminator is in DistributedDataParallel."""
    generator, discriminator = nn.Linear(4, 4), DistributedDataParallel(model())
    nn.init.normal_(generator.weight, generator=torch.Generator().manual_seed(1))
    nn.init.zeros_(generator.bias)
    optimizers = [sgd(generator), sgd(discriminator)]
    for _ in range(3):
        for optimizer in optimizers:
            generator.zero_grad()
            discriminator.zero_grad()
            discriminator(generator(data())).square().sum().backward()
            optimizer.step()


def leaves_a_layer_out() -> None:
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})
    net.forward = lambda x: net["a"](x)  # type: ignore[method-assign]
    ddp = DistributedDataParallel(net)
    ddp(data()).square().sum().backward()
    sgd(ddp).step()


def steps_inside_no_sync() -> None:
    ddp = DistributedDataParallel(model())
    with ddp.no_sync():
        ddp(data()).square().sum().backward()
    sgd(ddp).step()


def calls_the_module_inside() -> None:
    net = model()
    ddp = DistributedDataParallel(net)
    net(data()).square().sum().backward()
    sgd(ddp).step()


def leaves_out_small_buckets(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    done = torch.futures.Future[Tensor]()
    done.set_result(bucket.buffer())
    return done


def has_a_hook_that_averages_nothing() -> None:
    ddp = DistributedDataParallel(model())
    ddp.register_comm_hook(None, leaves_out_small_buckets)
    ddp(data()).square().sum().backward()
    sgd(ddp).step()


def unfreezes_a_layer_too_late() -> None:
    net = model()
    net[2].requires_grad_(requires_grad=False)
    ddp = DistributedDataParallel(net)
    net[2].requires_grad_()
    ddp(data()).square().sum().backward()
    sgd(ddp).step()


def goes_back_twice_from_one_forward_pass() -> None:
    ddp = DistributedDataParallel(model())
    loss = ddp(data()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    sgd(ddp).step()


def averages_each_micro_batch() -> None:
    ddp = DistributedDataParallel(model())
    for part in data().split(2):
        ddp(part).square().sum().backward()
    sgd(ddp).step()


def starts_with_other_weights() -> None:
    net = model(seed=dist.get_rank())
    optimizer = sgd(net)
    bias = net[2].bias
    net(data()).square().sum().backward()
    average(net)
    assert bias.grad is not None
    optimizer.step()


def starts_with_other_adapters() -> None:
    """The first gradient of the lower part is zero, as the upper part begins with zeros."""
    trains_adapters(seed=dist.get_rank())


def trains_adapters(seed: int, num_averaged: int = 2) -> None:
    torch.manual_seed(0)
    base = nn.Linear(4, 4)
    torch.manual_seed(seed)
    adapters = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False))
    nn.init.zeros_(adapters[1].weight)
    train(sgd(adapters), 3, lambda: base(data()) + adapters(data()), adapters[2 - num_averaged :])


def has_a_rate_of_its_own() -> None:
    net = model()
    train(sgd(net, lr=0.1 * (1 + dist.get_rank())), 2, lambda: net(data()), net)


def trains_on_the_same_data() -> None:
    ddp = DistributedDataParallel(model())
    ddp(torch.ones(6, 4)).square().sum().backward()
    sgd(ddp).step()


def sums_gradients_in_another_order() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net(data()).square().sum().backward()
    for parameter in [net[0].weight, net[1].weight][:: 1 - 2 * dist.get_rank()]:
        dist.all_reduce(parameter.grad)


def averages_only_what_has_a_gradient() -> None:
    torch.manual_seed(0)
    heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = sgd(heads)
    for _ in range(2):
        optimizer.zero_grad()
        heads[dist.get_rank()](data()).square().sum().backward()
        for parameter in heads.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        optimizer.step()


def averages_one_of_two_layers_in_a_list() -> None:
    torch.manual_seed(0)
    heads = [nn.Linear(4, 4), nn.Linear(4, 4)]
    mine = heads[dist.get_rank()]
    mine(data()).square().sum().backward()
    average(mine)


def calls_from_lines_in_another_order() -> None:
    a, b = torch.ones(1), torch.full((1,), 100.0)
    if dist.get_rank() == 0:
        sum_a(a)
        sum_b(b)
    else:
        sum_b(b)
        sum_a(a)


def sum_a(x: Tensor) -> None:
    dist.all_reduce(x)


def sum_b(x: Tensor) -> None:
    dist.all_reduce(x)


def logs_means_in_another_order() -> None:
    loss, accuracy = data().sum(), data().mean()
    if dist.get_rank() == 0:
        print(f"loss {mean_over_ranks(loss)}, accuracy {mean_over_ranks(accuracy)}")
    else:
        best = max(0.0, mean_over_ranks(accuracy))
        mean_over_ranks(loss)
        assert best >= 0.0


def mean_over_ranks(x: Tensor) -> float:
    mean = x.clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def gathers_into_one_tensor() -> None:
    places = [torch.zeros(1)] * dist.get_world_size()
    dist.all_gather(places, torch.tensor([float(dist.get_rank())]))


def gathers_without_gradient() -> None:
    net = model()
    features = net(data())
    parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features)
    (features @ torch.cat(parts).T).sum().backward()


def meets_another_tensor() -> None:
    a, b = torch.ones(1), torch.full((1,), 100.0)
    if dist.get_rank() == 0:
        dist.all_reduce(a)
        dist.all_reduce(b)
    else:
        dist.all_reduce(b)
        dist.all_reduce(a)


def drops_a_message() -> None:
    if dist.get_rank() == 0:
        dist.isend(torch.ones(4), 1)
    else:
        dist.recv(torch.empty(4), 0)


def clips_each_shard() -> None:
    shard = nn.Parameter(torch.zeros(4))
    shard.grad = torch.arange(1.0, 9.0)[dist.get_rank() * 4 :][:4].clone()
    nn.utils.clip_grad_norm_([shard], 1.0)
    torch.optim.SGD([shard], lr=0.1).step()


def averages_after_the_step() -> None:
    net = model()
    optimizer = sgd(net)
    for _ in range(3):
        optimizer.zero_grad()
        net(data()).square().sum().backward()
        optimizer.step()
        average(net)


def skips_a_step() -> None:
    ddp = DistributedDataParallel(model())
    optimizer = sgd(ddp)
    for step in range(4):
        optimizer.zero_grad()
        ddp(data()).square().sum().backward()
        if (dist.get_rank(), step) != (1, 2):
            optimizer.step()


def clips_before_averaging() -> None:
    net = model()
    net(data()).square().sum().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    average(net)
    sgd(net).step()


def has_a_nan_of_its_own() -> None:
    net = model()
    optimizer = sgd(net)
    for step in range(3):
        optimizer.zero_grad()
        net(data()).square().sum().backward()
        average(net)
        optimizer.step()
        if (dist.get_rank(), step) == (1, 1):
            nn.init.constant_(net[2].bias, float("nan"))


def clips_a_shard_with_nan() -> None:
    shard = nn.Parameter(torch.zeros(4))
    shard.grad = torch.full((4,), [3.0, float("nan")][dist.get_rank()])
    nn.utils.clip_grad_norm_([shard], 1.0)
    torch.optim.SGD([shard], lr=0.1).step()


def clips_shards_of_nearly_equal_norms() -> None:
    clips_a_number([1.0, 1.0, 1.00004][dist.get_rank()])


def clips_a_number(norm: float) -> None:
    shard = nn.Parameter(torch.zeros(1))
    shard.grad = torch.full((1,), norm)
    nn.utils.clip_grad_norm_([shard], 0.1)
    torch.optim.SGD([shard], lr=0.1).step()


def has_nans_of_two_kinds() -> None:
    """Both are NaN, with another sign."""
    net = model()
    optimizer = sgd(net)
    for _ in range(3):
        optimizer.zero_grad()
        net(data()).square().sum().backward()
        average(net)
        optimizer.step()
        nn.init.constant_(net[2].bias, float("-nan" if dist.get_rank() else "nan"))


def repeats_an_epoch() -> None:
    examples = TensorDataset(torch.arange(8.0))
    sampler: DistributedSampler[object] = DistributedSampler(examples)
    for _ in range(2):
        for _batch in DataLoader(examples, sampler=sampler):
            pass


def shuffles_by_rank() -> None:
    examples = TensorDataset(torch.arange(8.0))
    sampler: DistributedSampler[object] = DistributedSampler(examples, seed=7 * dist.get_rank())
    for _batch in DataLoader(examples, sampler=sampler):
        pass


def numbers_epochs_by_rank() -> None:
    examples = TensorDataset(torch.arange(8.0))
    sampler: DistributedSampler[object] = DistributedSampler(examples)
    for epoch in range(2):
        sampler.set_epoch(2 * epoch + dist.get_rank())
        for _batch in DataLoader(examples, sampler=sampler):
            pass


def takes_the_same_share() -> None:
    examples = TensorDataset(torch.arange(8.0))
    sampler: DistributedSampler[object] = DistributedSampler(examples, rank=0)
    for _batch in DataLoader(examples, sampler=sampler):
        pass


def averages_over_one_rank() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    ddp = DistributedDataParallel(model(), process_group=alone)
    ddp(data()).square().sum().backward()
    sgd(ddp).step()


def restores_momentum_on_one_rank() -> None:
    goes_on_from_momentum(num_steps=1)


def restores_momentum_and_goes_on() -> None:
    """The second step, before which the replicas differ, finds state on both ranks."""
    goes_on_from_momentum(num_steps=2)


def goes_on_from_momentum(num_steps: int) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if dist.get_rank() == 0:
        for parameter in net.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    train(optimizer, num_steps, lambda: net(data()), net)


def splits_samples_by_rank() -> None:
    examples = TensorDataset(torch.arange(16.0))
    part, _ = random_split(examples, [12, 4])
    for _batch in DataLoader(part, sampler=DistributedSampler(part)):
        pass


def leaves_a_shared_gradient_in_parts() -> None:
    """Without the all-reduce that a column-parallel layer's input needs in the backward pass."""
    trains_with_a_split_layer(sums=False)


def trains_with_a_split_layer(*, sums: bool = True) -> None:
    embedding, half, head, optimizer = split_model()
    for _ in range(2):
        optimizer.zero_grad()
        predicts_with_a_split_layer(embedding, half, head)
        for parameter in embedding.parameters() if sums else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()


def predicts_with_a_split_layer(embedding: nn.Linear, half: nn.Linear, head: nn.Linear) -> None:
    mine = half(embedding(shared_data())).relu().sum(1)
    others = mine.detach().clone()
    dist.all_reduce(others)
    head((mine + others - mine.detach()).unsqueeze(1)).square().sum().backward()


def leaves_a_shared_gradient_in_parts_of_equal_norm() -> None:
    """Once the parameters have parted, each rank has a loss of its own."""
    torch.manual_seed(0)
    embedding, halves = nn.Linear(4, 8, bias=False), torch.randn(8)
    half = nn.Parameter(halves if dist.get_rank() else halves.flip(0))
    optimizer = torch.optim.SGD([embedding.weight, half], 0.01)
    for step in range(2):
        optimizer.zero_grad()
        mine = (embedding(shared_data()) @ half).sum()
        total = mine.detach().clone()
        dist.all_reduce(total)
        (mine + total - mine.detach() + step * dist.get_rank()).square().backward()
        optimizer.step()


def split_model() -> tuple[nn.Linear, nn.Linear, nn.Linear, torch.optim.Optimizer]:
    """Return a shared layer, this rank's half of the next one, and a shared head."""
    torch.manual_seed(0)
    embedding, head = nn.Linear(4, 8), nn.Linear(1, 2)
    torch.manual_seed(1 + dist.get_rank())
    half = nn.Linear(8, 4)
    parameters = nn.ModuleList([embedding, half, head]).parameters()
    return embedding, half, head, torch.optim.SGD(parameters, 0.01)


def shared_data() -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(3))


def leaves_a_norm_before_a_split_layer_in_parts() -> None:
    """Ones and zeros, as shards begin with, too; but a norm is never split."""
    torch.manual_seed(dist.get_rank())
    norm, half = nn.LayerNorm(4), nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.SGD([*norm.parameters(), *half.parameters()], 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        mine = half(norm(shared_data())).square().sum(1)
        total = mine.detach().clone()
        dist.all_reduce(total)
        (mine + total - mine.detach()).square().sum().backward()
        optimizer.step()


def leaves_a_layer_out_of_fsdp() -> None:
    net = model()
    fully_shard(net[0], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    train(sgd(net), 2, lambda: net(data()))


def trains_shards_on_the_same_data() -> None:
    trains_shards(shared_data)


def trains_shards(data: Callable[[], Tensor]) -> None:
    net = model()
    for layer in (net[0], net):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    train(sgd(net), 2, lambda: net(data()))


def drops_the_same_elements() -> None:
    net = model()
    net.append(nn.Dropout(0.5))
    ddp = DistributedDataParallel(net)
    torch.manual_seed(1)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    ddp(inputs).sum().backward()
    sgd(ddp).step()


def shards_after_making_the_optimizer() -> None:
    net = model()
    optimizer = sgd(net)
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for _ in range(2):
        net(data()).square().sum().backward()
        optimizer.step()


def shards_after_making_the_optimizer_and_accumulates() -> None:
    net = model()
    optimizer = sgd(net)
    accumulates_shards(net, optimizer, num_batches=5)


def accumulates_shards(
    net: nn.Module, optimizer: torch.optim.Optimizer | None = None, num_batches: int = 4
) -> None:
    """Average gradients in every second backward pass, and step after it."""
    sharded: Any = fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optimizer or sgd(net)
    for number in range(num_batches):
        is_last = number % 2 == 1
        sharded.set_requires_gradient_sync(requires_gradient_sync=is_last)
        net(data()).square().sum().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def forgets_a_layer_beside_split_sequences() -> None:
    trains_on_split_sequences(forgotten=1)


def trains_on_split_sequences(forgotten: int = 0) -> None:
    """Each rank has half of the heads between two all_to_alls, and half of the sequence else."""
    net = model()
    optimizer = sgd(net, lr=0.001)
    train(optimizer, 2, lambda: net[2](trades_heads(net[:2](data()))), net[: len(net) - forgotten])


def trades_heads(x: Tensor) -> Tensor:
    """Sum over a sequence that is split over the ranks, for each of 8 heads."""
    heads = Traded.apply(torch.cat(x.chunk(2, dim=1)))
    sums = heads.view(2, 6, 4).cumsum(0).view(12, 4)
    return torch.cat(Traded.apply(sums).chunk(2), dim=1)


class Traded(torch.autograd.Function):
    """An all_to_all that goes back as another one."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        traded = torch.empty_like(x)
        dist.all_to_all_single(traded, x.contiguous())
        return traded

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return Traded.forward(_, gradient)


def forgets_the_layer_before_experts() -> None:
    trains_a_layer_before_experts(forgotten=1)


def trains_a_layer_before_experts(forgotten: int = 0) -> None:
    """Experts differ from the start, the layers around them do not."""
    torch.manual_seed(0)
    head, gate = nn.Linear(4, 2), nn.Linear(4, 4)
    torch.manual_seed(1 + dist.get_rank())
    expert = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    layers = nn.ModuleList([head, gate, expert])
    optimizer = sgd(layers, lr=0.01)
    train(
        optimizer,
        2,
        lambda: head(Traded.apply(expert(Traded.apply(gate(data()))))),
        layers[: 2 - forgotten],
    )


def forgets_a_norm_before_split_sequences() -> None:
    trains_a_norm_before_split_sequences(forgotten=1)


def trains_a_norm_before_split_sequences(forgotten: int = 0) -> None:
    torch.manual_seed(0)
    head, norm = nn.Linear(4, 2), nn.LayerNorm(4)
    torch.manual_seed(1 + dist.get_rank())
    up, down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
    layers = nn.ModuleList([head, norm, up, down])
    optimizer = sgd(layers, lr=0.01)
    train(
        optimizer,
        2,
        lambda: head(Scattered.apply(down(up(Gathered.apply(norm(data())))))),
        layers[: 2 - forgotten],
    )


def forgets_norms_around_split_layers() -> None:
    trains_norms_around_split_layers(sums_norm=False)


def trains_norms_around_split_layers(*, sums_norm: bool = True) -> None:
    """Each rank has a part of the sequence, and, between two exchanges, a part of two layers."""
    norm, bias = nn.LayerNorm(4), nn.Parameter(torch.zeros(4))
    torch.manual_seed(1 + dist.get_rank())
    up, down = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.SGD([bias, *nn.ModuleList([norm, up, down]).parameters()], 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        hidden = Scattered.apply(down(up(Gathered.apply(norm(data()))).relu())) + bias
        (hidden - data()).square().sum().backward()
        for parameter in [bias, *norm.parameters()] if sums_norm else [bias]:
            dist.all_reduce(parameter.grad)
        optimizer.step()


def forgets_to_average_a_norm_over_replicas() -> None:
    """Ranks 0 and 1 have parts of one batch of sequences, and ranks 2 and 3 of another."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parts_of_sequences(mesh["tp"])
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    parts = torch.randn(2, 6, 4, generator=generator).chunk(2, dim=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    net(parts[mesh.get_local_rank("tp")]).square().sum().backward()
    for parameter in net[1:].parameters():
        dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group("dp"))  # type: ignore[union-attr]
    optimizer.step()


def parts_of_sequences(mesh: DeviceMesh) -> nn.Sequential:
    """Return a norm on each rank's part of the sequences, before layers that are split."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(net, mesh, plan)  # type: ignore[arg-type]
    return net


def clips_the_slice_of_a_split_layer() -> None:
    embedding, half, head, optimizer = split_model()
    predicts_with_a_split_layer(embedding, half, head)
    nn.utils.clip_grad_norm_(half.parameters(), 1e-3)
    optimizer.step()


def clips_a_trunk_with_each_head() -> None:
    trains_heads_of_their_own(clips_trunk=True)


def clips_the_shard_of_an_average() -> None:
    clips_a_shard(average)


def clips_the_shard_that_its_owner_gets() -> None:
    clips_a_shard(sends_gradients_to_owners)


def clips_a_shard(exchange: Callable[[nn.Module], None]) -> None:
    net = model()
    mine = [*net.parameters()][dist.get_rank() :: 2]
    optimizer = torch.optim.SGD(mine, 0.1)
    net(data()).square().sum().backward()
    exchange(net)
    nn.utils.clip_grad_norm_(mine, 0.1)
    optimizer.step()


def sends_gradients_to_owners(net: nn.Module) -> None:
    for number, parameter in enumerate(net.parameters()):
        assert parameter.grad is not None
        dist.reduce(parameter.grad, number % 2)


def decays_weights_on_one_rank() -> None:
    net = model()
    net(data()).square().sum().backward()
    average(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1 * dist.get_rank())
    optimizer.step()
    dist.all_reduce(torch.ones(1))


def joins_gradients_in_another_order() -> None:
    joins_gradients([1, -1][dist.get_rank()])


def joins_gradients(direction: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = sgd(net)
    for _ in range(2):
        optimizer.zero_grad()
        net(data()).square().sum().backward()
        parameters = [*net.parameters()][::direction]
        flat = nn.utils.parameters_to_vector([p.grad for p in parameters])  # type: ignore[misc]
        dist.all_reduce(flat)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p) / dist.get_world_size()
        optimizer.step()


def counts_samples_twice() -> None:
    counts_samples(lambda share: len(share))


def counts_samples(count: Callable[[Tensor], int]) -> None:
    """Evaluate 9 samples, of which a sampler gives each of two ranks 5."""
    examples = TensorDataset(torch.arange(9.0))
    sampler: DistributedSampler[object] = DistributedSampler(examples, shuffle=False)
    with torch.no_grad():
        share = torch.cat([x for (x,) in DataLoader(examples, sampler=sampler, batch_size=2)])
    num_samples = count(share)
    sums = torch.tensor([share[:num_samples].sum(), num_samples])
    dist.all_reduce(sums)


WRONG: dict[Callable[[], None], str] = {
    shards_after_making_the_optimizer: "an optimizer took 2 steps on ranks 0 and 1 without",
    shards_after_making_the_optimizer_and_accumulates: "Was it made before the model got other",
    forgets_the_second_layer: "No collective took them; the others went through test_sanitizer.py:",
    forgets_a_new_head: " in forgets_a_new_head. 3 was replaced at test_sanitizer.py:",
    forgets_a_layer_beside_split_sequences: "step 1: 2 of 4 gradients differ between ranks 0",
    averages_one_of_two_models: "equal parameters, and step with gradients that were never "
    "averaged, and differ: weight and bias",
    forgets_the_layer_before_experts: "step 1: 1.weight and 1.bias had equal values on ranks 0",
    forgets_norms_around_split_layers: "step 1: 0.weight and 0.bias had equal values on ranks 0 "
    "and 1, got different gradients, and have differed since, though",
    forgets_a_norm_before_split_sequences: "step 1: 1.weight and 1.bias had equal values on ranks",
    averages_nothing: "equal parameters, and step with gradients that were never averaged",
    shares_out_the_update_but_averages_nothing: "ZeroRedundancyOptimizer shares the update out",
    appends_a_layer_after_wrapping: "it averages those that its module has when it is made, test_",
    loads_on_one_rank_after_wrapping: "Has something changed them since then, such as load_state_",
    wraps_without_a_broadcast: "given init_sync=False, broadcasts nothing when it is made, test_",
    never_lets_gradients_be_averaged: "keeps gradients to itself since set_requires_gradient_sync",
    averages_nothing_but_a_loss: "step with gradients that were never averaged, and differ",
    splits_a_layer_between_batches: "These ranks need the same batch, chosen by their place along",
    restores_momentum_and_goes_on: "of no parameters on rank 1, and of 4 on rank 0",
    leaves_a_layer_out: "waited for the gradients of b.weight and b.bias, which",
    steps_inside_no_sync: "its forward passes ran inside no_sync(), test_sanitizer.py:",
    calls_the_module_inside: "not called, but that of the module inside, test_sanitizer.py:",
    has_a_hook_that_averages_nothing: "its communication hook, leaves_out_small_buckets at test_",
    unfreezes_a_layer_too_late: "They required no gradient when DistributedDataParallel was made, "
    "so it leaves them out: let them require one before; test_sanitizer.py:",
    goes_back_twice_from_one_forward_pass: "it averages in the first backward pass after",
    averages_each_micro_batch: "averaged gradients in 3 backward passes for one step",
    starts_with_other_weights: "their gradients, but began with different parameters: 0.weight",
    starts_with_other_adapters: "step 2: ranks 0 and 1 average their gradients, but began with",
    has_a_rate_of_its_own: "Their learning rates are 0.1 and 0.2: ",
    decays_weights_on_one_rank: "step 1: ranks 0 and 1 were equal before it, the last one, with "
    "equal gradients, and differ after it: 0.weight",
    trains_on_the_same_data: "ranks 0 and 1 computed the same gradients",
    trains_shards_on_the_same_data: "do all of them train on the same data? Give the DataLoader",
    sums_gradients_in_another_order: "as call 1, rank 0 averages the gradient of 0.weight (p",
    joins_gradients_in_another_order: "in call 1, rank 0 averages that of 0.weight (parameter 1), "
    "and rank 1 that of 1.bias (parameter 4)",
    averages_only_what_has_a_gradient: "in call 1, rank 0 averages that of 0.weight (parameter 1), "
    "and rank 1 that of 1.weight (parameter 3)",
    averages_one_of_two_layers_in_a_list: "rank 0 averages that of weight (parameter 1), and "
    "rank 1 that of weight (parameter 3)",
    logs_means_in_another_order: "as call 1, rank 0 calls mean_over_ranks(loss), and rank 1 calls "
    "mean_over_ranks(accuracy)",
    calls_from_lines_in_another_order: "as call 1, rank 0 calls from test_sanitizer.py",
    gathers_into_one_tensor: "the 2 tensors that all_gather fills on ranks 0 and 1 share memory",
    gathers_without_gradient: "all_gather was given a tensor that requires a gradient",
    meets_another_tensor: "as call 1, rank 0 calls dist.all_reduce(a), and rank 1 calls dist.",
    drops_a_message: "and its message may be lost: rank 0 isend to rank 1",
    clips_the_slice_of_a_split_layer: "each took the norm of its own gradients",
    clips_a_trunk_with_each_head: "each took the norm of its own gradients",
    clips_the_shard_that_its_owner_gets: "each took the norm of its own gradients",
    clips_the_shard_of_an_average: "each took the norm of its own gradients",
    clips_each_shard: "scaled the gradients by 0.183 on rank 0 and by 0.0758 on rank 1",
    clips_a_shard_with_nan: "scaled the gradients by 0.167 on rank 0 and by nan on rank 1",
    has_a_nan_of_its_own: "step 3: ranks 0 and 1 were equal before step 2, and differ now: 2.bias",
    averages_after_the_step: "They are averaged only after it, or with other ranks.",
    skips_a_step: "step 3: rank 1 had averaged gradients 4 times before it, and rank 0 3 times",
    clips_before_averaging: "each took the norm of its own gradients, instead of",
    repeats_an_epoch: "ranks 0 and 1 went through a DistributedSampler again, still in epoch 0",
    shuffles_by_rank: "ranks 0 and 1 go through a DistributedSampler with seed + epoch = 0 and 7",
    numbers_epochs_by_rank: "go through a DistributedSampler with seed + epoch = 0 and 1",
    takes_the_same_share: "ranks 0 and 1 go through a DistributedSampler that was given rank=0",
    averages_over_one_rank: "DistributedDataParallel averages over rank 0 alone on rank 0",
    restores_momentum_on_one_rank: "of no parameters on rank 1, and of 4 on rank 0",
    counts_samples_twice: "an evaluation counts 10 samples of a dataset that has 9: to give each",
    splits_samples_by_rank: "ranks 0 and 1 go through DistributedSamplers of different parts",
    leaves_a_norm_before_a_split_layer_in_parts: "step 1: weight (parameter 1) and bias had equal",
    leaves_a_layer_out_of_fsdp: "step 1: 2.weight and 2.bias had equal values on ranks 0 and 1",
    leaves_a_shared_gradient_in_parts_of_equal_norm: "step 1: weight had equal values on ranks",
    leaves_a_shared_gradient_in_parts: "step 1: 0.weight and 0.bias had equal values on ranks 0",
    drops_the_same_elements: "step 1: ranks 0 and 1 drop the same elements",
}


def averages_over_the_stages() -> None:
    """Ranks 0 and 2 hold one stage, and ranks 1 and 3 the next one."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    net = model(seed=dist.get_rank() % 2)
    net(data()).square().sum().backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad, group=groups[dist.get_rank() // 2])
    sgd(net).step()


def test_ranks_that_average_with_others_than_their_replicas_are_named() -> None:
    (line,) = [x for x in findings(averages_over_the_stages, 4) if "average their" in x]
    assert "ranks 0 and 1 average their gradients, but began with different parameters" in line
    assert "Ranks 0 and 2 hold equal ones: average over these ranks" in line


def test_a_norm_that_is_averaged_over_no_replicas_is_named() -> None:
    lines = findings(forgets_to_average_a_norm_over_replicas, num_ranks=4)
    start = (
        "step 1: 2 of 3 gradients differ between ranks 0-3, whose parameters are equal: 0.weight"
    )
    assert any(line.startswith(start) for line in lines), lines


def trains_alone_before() -> None:
    """Rank 0 has an optimizer more, which comes first there."""
    if dist.get_rank() == 0:
        net = model()
        net(data()).square().sum().backward()
        sgd(net).step()
    ddp = DistributedDataParallel(model())
    train(sgd(ddp, lr=[0.1, 0.2][dist.get_rank()]), 2, lambda: ddp(data()))


def test_optimizers_are_matched_beside_one_that_another_rank_lacks() -> None:
    (line,) = findings(trains_alone_before)
    assert line.startswith("step 2: ranks 0 and 1 were equal before step 1, and differ now: ")
    assert "Their learning rates are 0.1 and 0.2" in line


def test_factors_are_told_apart() -> None:
    (line,) = findings(clips_shards_of_nearly_equal_norms, 3)
    assert "scaled the gradients by 0.1 on rank 0 and by 0.099996 on rank 2" in line


def differs_on_the_last_rank() -> None:
    net = model()
    net(data()).square().sum().backward()
    average(net)
    assert net[2].bias.grad is not None
    net[2].bias.grad *= 1 + (dist.get_rank() // 2) / 1e5
    sgd(net).step()


def test_the_norms_of_two_ranks_that_differ_are_named() -> None:
    (line,) = findings(differs_on_the_last_rank, 3)
    norms = re.search(r"norm (\S+) on rank 0, (\S+) on rank 2\)", line)
    assert norms is not None
    assert norms[1] != norms[2]


def trains_on_shares(share: Callable[[int], int]) -> None:
    ddp = DistributedDataParallel(model())
    optimizer = sgd(ddp)
    for batch in torch.randn(2, 4, 6, 4, generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad()
        ddp(batch[share(dist.get_rank())]).square().sum().backward()
        optimizer.step()


def test_two_of_four_ranks_that_train_on_one_share_are_named() -> None:
    """Each host's first rank takes the first share, and its second rank the second one."""
    (line,) = simulate(
        trains_on_shares, 4, lambda rank: rank % 2, options=Options(is_sanitized=True)
    ).findings
    assert line.startswith("ranks 0 and 2 computed the same gradients")


def test_shares_of_their_own_are_no_finding() -> None:
    options = Options(is_sanitized=True)
    assert simulate(trains_on_shares, 4, lambda rank: rank, options=options).findings == []


@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__)
def test_a_mistake_is_named_with_its_line(program: Callable[[], None]) -> None:
    lines = findings(program)
    assert any(WRONG[program] in line for line in lines), lines
    assert all(Path(__file__).name in line for line in lines)


# Right programs


def trains_with_ddp() -> None:
    net = model()
    net.append(nn.Dropout(0.5))
    ddp = DistributedDataParallel(net)
    torch.manual_seed(dist.get_rank())
    optimizer = sgd(ddp)
    for _ in range(3):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(data()).square().sum().backward()
        ddp(data() + 1).square().sum().backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        optimizer.step()


def trains_with_all_reduces() -> None:
    net = model(seed=dist.get_rank())
    for parameter in net.parameters():
        dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss = net(data()).square().mean()
        loss.backward()
        average(net)
        optimizer.step()
        dist.all_reduce(loss)


def averages_parameters_at_times() -> None:
    net = model()
    optimizer = sgd(net)
    for step in range(4):
        optimizer.zero_grad()
        net(data()).square().sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        if step % 2:
            for parameter in net.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()


def averages_changes_in_an_outer_optimizer(num_steps: int = 4) -> None:
    net, outer = model(), model()
    inner_steps, outer_steps = sgd(net), torch.optim.SGD(outer.parameters(), 0.7, momentum=0.9)
    for step in range(num_steps):
        inner_steps.zero_grad()
        net(data()).square().sum().backward()
        inner_steps.step()
        if step % 2:
            for ours, theirs in zip(net.parameters(), outer.parameters(), strict=True):
                theirs.grad = theirs.detach() - ours.detach()
            average(outer)
            outer_steps.step()
            net.load_state_dict(outer.state_dict())


def averages_changes_once() -> None:
    """One round: the inner optimizer takes no step with the parameters that all ranks get."""
    averages_changes_in_an_outer_optimizer(num_steps=2)


def averages_parameters_before_another_optimizer_goes_on() -> None:
    averages_parameters_at_times()
    trains_with_ddp()


def clips_each_sample() -> None:
    net = model()
    optimizer = sgd(net)
    sums = [torch.zeros_like(parameter) for parameter in net.parameters()]
    for sample in data():
        optimizer.zero_grad()
        net(sample).square().sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        for total, parameter in zip(sums, net.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad
    for total, parameter in zip(sums, net.parameters(), strict=True):
        dist.all_reduce(total)
        parameter.grad = total
    optimizer.step()


def splits_a_layer() -> None:
    """Column and row parallel, with a replicated norm."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    first, second = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)
    torch.manual_seed(5)
    norm = nn.LayerNorm(4)
    optimizer = torch.optim.SGD(
        [*first.parameters(), *second.parameters(), *norm.parameters()], 0.1
    )
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
        y = second(first(x).relu())
        dist.all_reduce(y)
        norm(y).square().sum().backward()
        optimizer.step()


def passes_stages_on() -> None:
    torch.manual_seed(0)
    stage = nn.Linear(4, 4)
    optimizer = sgd(stage)
    goes_through_its_stage(stage)
    optimizer.step()


def shards_an_optimizer() -> None:
    net = model()
    shards = [parameter for i, parameter in enumerate(net.parameters()) if i % 2 == dist.get_rank()]
    net(data()).square().sum().backward()
    average(net)
    torch.optim.Adam(shards).step()
    for number, parameter in enumerate(net.parameters()):
        dist.broadcast(parameter.data, src=number % 2)


def gathers_with_gradient() -> None:
    features = model()(data())
    parts = differentiable.all_gather(features)
    (features @ torch.cat(parts).T).sum().backward()


def gathers_with_gradient_in_ddp() -> None:
    ddp = DistributedDataParallel(model())
    everything = torch.cat(differentiable.all_gather(ddp(data())))
    (everything @ everything.T).square().sum().backward()
    sgd(ddp).step()


def puts_its_own_part_in_place() -> None:
    features = model()(data())
    parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features)
    parts[dist.get_rank()] = features
    everything = torch.cat(parts)
    (everything @ everything.T).sum().backward()


def takes_turns_as_root() -> None:
    for root in range(dist.get_world_size()):
        if dist.get_rank() == root:
            dist.broadcast(torch.ones(2), src=root)
        else:
            dist.broadcast(torch.zeros(2), src=root)


def goes_through_epochs() -> None:
    examples = TensorDataset(torch.arange(8.0))
    sampler: DistributedSampler[object] = DistributedSampler(examples)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for _batch in DataLoader(examples, sampler=sampler):
            pass
    for _ in range(2):
        for _batch in DataLoader(examples, sampler=DistributedSampler(examples, shuffle=False)):
            pass


def shuffles_everything_by_rank() -> None:
    examples = TensorDataset(torch.arange(8.0))
    all_of_them = {"num_replicas": 1, "rank": 0, "seed": dist.get_rank()}
    sampler: DistributedSampler[object] = DistributedSampler(examples, **all_of_them)
    for _batch in DataLoader(examples, sampler=sampler):
        pass


def leaves_out_steps_in_a_join() -> None:
    ddp = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with Join([ddp, optimizer]):
        for _ in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            ddp(data()).square().sum().backward()
            optimizer.step()


def brings_gradients_to_the_owners_of_a_shared_update() -> None:
    shares_out_updates(model())


def brings_a_few_numbers_to_the_owners_of_a_shared_update() -> None:
    torch.manual_seed(0)
    shares_out_updates(nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 2)))


def goes_back_through_another_model_before_a_shared_update() -> None:
    critic = nn.Linear(2, 1)
    shares_out_updates(model(), lambda: critic(torch.ones(1, 2)).sum().backward())


def shares_out_updates(net: nn.Module, before_step: Callable[[], object] = bool) -> None:
    """Add gradients up on the ranks that update their parameters."""
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    owners = optimizer._param_to_rank
    for _ in range(3):
        optimizer.zero_grad()
        net(data()).square().sum().backward()
        for parameter in net.parameters():
            dist.reduce(parameter.grad, owners[parameter])
        before_step()
        optimizer.step()


def normalizes_parts_of_sequences() -> None:
    """Gradients of the norm's parameters are partial sums, which the optimizer adds up."""
    net = parts_of_sequences(init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    train(optimizer, 2, lambda: net(data().view(2, 3, 4)))


def accumulates_gradients_of_shards() -> None:
    accumulates_shards(model())


def goes_over_to_local_sgd() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    ddp = DistributedDataParallel(model())
    alone, _ = dist.new_subgroups(group_size=1)
    ddp.register_comm_hook(hook.PostLocalSGDState(None, alone, 2), hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(sgd(ddp), averager)
    for step in range(6):
        optimizer.zero_grad()
        ddp(data() + step).square().sum().backward()
        optimizer.step()


def gives_each_epoch_a_seed() -> None:
    examples = TensorDataset(torch.arange(8.0))
    for epoch in range(2):
        for _batch in DataLoader(examples, sampler=DistributedSampler(examples, seed=epoch)):
            pass


def goes_through_two_datasets_at_once() -> None:
    examples = TensorDataset(torch.arange(8.0))
    samplers = [DistributedSampler(examples, seed=seed) for seed in range(2)]
    first, second = [DataLoader(examples, sampler=sampler) for sampler in samplers]
    for _pair in zip(first, second, strict=True):
        pass


def gathers_the_gradients_of_owners() -> None:
    """Each rank scales the gradient of the layer that it owns, as in K-FAC, Shampoo and Muon."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = sgd(net)
    for step in range(2):
        optimizer.zero_grad()
        net(data()).square().mean().backward()
        average(net)
        owners = [net[(owner + step) % 2].weight for owner in range(2)]
        parts = [torch.empty(4, 4) for _ in range(2)]
        dist.all_gather(parts, owners[dist.get_rank()].grad.div_(2))
        for weight, part in zip(owners, parts, strict=True):
            weight.grad.copy_(part)
        optimizer.step()


def checks_that_gradients_are_equal() -> None:
    net = model()
    net(data()).square().sum().backward()
    average(net)
    parts = [torch.empty(8, 4) for _ in range(2)]
    dist.all_gather(parts, net[0].weight.grad)
    assert parts[0].equal(parts[1])
    sgd(net).step()


def ties_two_stages_of_a_whole_model() -> None:
    """Each rank makes both stages, and uses its own; the tied weights get the sum."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].load_state_dict(net[0].state_dict())
    optimizer = sgd(net)
    for _ in range(2):
        optimizer.zero_grad()
        goes_through_its_stage(net[dist.get_rank()])
        dist.all_reduce(net[dist.get_rank()].weight.grad)
        optimizer.step()


def goes_through_its_stage(stage: nn.Module) -> None:
    if dist.get_rank() == 0:
        y = stage(data())
        dist.send(y.detach(), 1)
        gradient = torch.empty_like(y)
        dist.recv(gradient, 1)
        y.backward(gradient)
    else:
        x = torch.empty(6, 4)
        dist.recv(x, 0)
        x.requires_grad_()
        stage(x).square().sum().backward()
        assert x.grad is not None
        dist.send(x.grad, 0)


def makes_one_model_more_on_rank_0() -> None:
    shown = model() if dist.get_rank() == 0 else None
    net, averaged = model(), model()
    train(sgd(net), 2, lambda: net(data()), net)
    averaged.load_state_dict(net.state_dict())
    del shown


def shards_what_begins_alike() -> None:
    net = model()
    for layer in (*net, net):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for parameter in net.parameters():
        nn.init.normal_(parameter.to_local(), generator=torch.Generator().manual_seed(1))
    train(sgd(net), 2, lambda: net(data()))


def asks_experts_that_begin_alike() -> None:
    torch.manual_seed(0)
    gate, expert = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*gate.parameters(), *expert.parameters()], 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        tokens = torch.empty(6, 4)
        dist.all_to_all_single(tokens, data())
        expert(gate(tokens)).square().sum().backward()
        average(gate)
        optimizer.step()


def sends_tokens_to_experts_and_back() -> None:
    """Experts begin alike, and only the layers before and behind them are averaged."""
    net, expert = model(), nn.Linear(8, 8)
    optimizer = sgd(nn.ModuleList([net, expert]))
    for _ in range(3):
        optimizer.zero_grad()
        back = Traded.apply(expert(Traded.apply(net[:2](data()))))
        net[2](back).square().sum().backward()
        average(net)
        optimizer.step()


def gathers_tokens_for_experts() -> None:
    """Each expert sees all tokens, and begins with a norm that is its own."""
    torch.manual_seed(0)
    net = model()
    torch.manual_seed(1 + dist.get_rank())
    expert = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    optimizer = sgd(nn.ModuleList([net, expert]), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        mixed = Scattered.apply(expert(Gathered.apply(net[:2](data()))))
        net[2](mixed).square().sum().backward()
        average(net)
        optimizer.step()


class Gathered(torch.autograd.Function):
    """The rows of all ranks; each rank gets the sum of its rows' gradients."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        everything = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
        dist.all_gather([*everything.chunk(dist.get_world_size())], x.contiguous())
        return everything

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return Scattered.forward(_, gradient)


class Scattered(torch.autograd.Function):
    """The sum of this rank's rows over all ranks."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        part = x.new_empty(len(x) // dist.get_world_size(), *x.shape[1:])
        dist.reduce_scatter(part, [*x.contiguous().chunk(dist.get_world_size())])
        return part

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return Gathered.forward(_, gradient)


def talks_to_other_agents() -> None:
    """Each rank has a policy and a loss of its own, and goes back through what the others heard."""
    torch.manual_seed(1 + dist.get_rank())
    policy = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = sgd(policy, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        said = policy[:2](data())
        heard = Scattered.apply(Gathered.apply(said).repeat(1, 1)) / dist.get_world_size()
        policy[2](said + heard).square().sum().backward()
        optimizer.step()


def compares_towers_of_their_own() -> None:
    """Two encoders of one shape are trained against each other, each for a loss of its own."""
    torch.manual_seed(1 + dist.get_rank())
    tower = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    optimizer = sgd(tower, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        mine = tower(data())
        (mine @ Gathered.apply(mine).T).logsumexp(1).sum().backward()
        optimizer.step()


def averages_norms_around_split_layers_at_times() -> None:
    """The shards are never averaged, and the norms after each second step."""
    norm = nn.LayerNorm(4)
    torch.manual_seed(1 + dist.get_rank())
    up, down = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)
    optimizer = sgd(nn.ModuleList([norm, up, down]), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        Scattered.apply(down(up(Gathered.apply(norm(data()))))).square().sum().backward()
        optimizer.step()
        for parameter in norm.parameters() if step % 2 else ():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()


def trains_a_head_with_a_norm_of_its_own() -> None:
    """Hooks average the trunk's gradients during the backward pass."""
    trunk = model()
    torch.manual_seed(dist.get_rank())
    head = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2))
    for parameter in trunk.parameters():
        parameter.register_hook(averaged)
    train(sgd(nn.ModuleList([trunk, head])), 2, lambda: head(trunk(data())))


def averaged(gradient: Tensor) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def averages_only_upper_adapters() -> None:
    trains_adapters(seed=dist.get_rank(), num_averaged=1)


def waits_at_several_lines() -> None:
    """Every other rank evaluates first."""
    for turn in range(2):
        if (dist.get_rank() + turn) % 2:
            waits_for_all()
        else:
            waits_for_all()


def waits_for_all() -> None:
    dist.all_reduce(torch.ones(1))


def logs_means_of_what_each_rank_draws() -> None:
    net = model()
    optimizer = sgd(net)
    for step in range(2):
        optimizer.zero_grad()
        net(data()).square().sum().backward()
        average(net)
        optimizer.step()
        if (dist.get_rank() + step) % 2:
            loss = data().sum()
            mean_over_ranks(loss)
        else:
            mixed = data().mean()
            mean_over_ranks(mixed)


def logs_means_in_each_branch() -> None:
    if dist.get_rank() == 0:
        loss, accuracy = data().sum(), data().mean()
        print(mean_over_ranks(loss), mean_over_ranks(accuracy))
    else:
        total, share = data().sum(), data().mean()
        mean_over_ranks(total)
        mean_over_ranks(share)


def trains_shards_on_parts_of_the_data() -> None:
    trains_shards(data)


def averages_adapters() -> None:
    trains_adapters(seed=3)


def sums_statistics_below_heads_with_norms() -> None:
    torch.manual_seed(0)
    trunk = nn.Linear(4, 8)
    torch.manual_seed(dist.get_rank())
    head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2))
    optimizer = sgd(nn.ModuleList([trunk, head]), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        features = trunk(data())
        means = differentiable.all_reduce(features.mean(0)) / 2
        head(features - means).square().sum().backward()
        average(trunk)
        optimizer.step()


def gathers_shards_of_a_layer() -> None:
    """ZeRO by hand: a layer is in shards, and a small one on all ranks is averaged."""
    torch.manual_seed(0)
    shard = nn.Parameter(torch.randn(8, 4).chunk(dist.get_world_size())[dist.get_rank()].clone())
    norm, head = nn.LayerNorm(4), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([shard, *norm.parameters(), *head.parameters()], 0.01)
    train(optimizer, 2, lambda: head(norm(data()) @ Gathered.apply(shard).T), norm, head)


def looks_up_rows_of_tables() -> None:
    """Each rank has a table that began like the others, and trains on what all tables give."""
    torch.manual_seed(0)
    table, top = nn.Embedding(6, 4), nn.Linear(4, 2)
    optimizer = sgd(nn.ModuleList([table, top]))
    for _ in range(2):
        optimizer.zero_grad()
        rows = table(torch.arange(6) % (2 + dist.get_rank()))
        top(Traded.apply(rows)).square().sum().backward()
        average(top)
        optimizer.step()


def searches_from_one_seed() -> None:
    """Each rank has a learning rate of its own, and the same data."""
    net = model()
    train(sgd(net, lr=0.1 * (1 + dist.get_rank())), 3, lambda: net(shared_data()))
    dist.all_reduce(net[0].bias.sum().detach())


def goes_back_from_an_edge_of_the_graph() -> None:
    net = model()
    loss = net(data()).square().sum()
    torch.autograd.backward(get_gradient_edge(loss))
    average(net)


def splits_samples_alike() -> None:
    examples = TensorDataset(torch.arange(16.0))
    part, rest = random_split(examples, [12, 4], torch.Generator().manual_seed(1))
    for one in (part, rest):
        for _batch in DataLoader(one, sampler=DistributedSampler(one)):
            pass


def trains_heads_of_their_own(*, clips_trunk: bool = False) -> None:
    torch.manual_seed(0)
    trunk = DistributedDataParallel(nn.Linear(4, 8))
    torch.manual_seed(dist.get_rank())
    head = nn.Linear(8, 2)
    optimizer = sgd(nn.ModuleList([trunk, head]))
    for _ in range(2):
        optimizer.zero_grad()
        head(trunk(data())).square().sum().backward()
        clipped = nn.ModuleList([head, *[trunk] * clips_trunk])
        nn.utils.clip_grad_norm_(clipped.parameters(), 0.1)
        optimizer.step()


def trains_heads_in_optimizers_of_their_own() -> None:
    trunk, head = model(), model(seed=dist.get_rank())
    optimizers = [sgd(trunk), sgd(head)]
    for _ in range(2):
        trunk.zero_grad()
        head.zero_grad()
        head[2](trunk[:2](data())).square().sum().backward()
        average(trunk)
        nn.utils.clip_grad_norm_(head.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()


def trains_a_model_on_each_rank() -> None:
    net = model(seed=dist.get_rank())
    net(data()).square().sum().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    sgd(net).step()


def goes_on_alone() -> None:
    """After training together, each rank trains on its own, and rank 0 rounds its weights."""
    net = model()
    together = sgd(net)
    net(data()).square().sum().backward()
    average(net)
    together.step()
    if dist.get_rank() == 0:
        net(data()).square().sum().backward()
        torch.optim.SGD(net.parameters(), 0.2).step()
        net.bfloat16()


def takes_the_step_of_rank_0() -> None:
    net = model()
    net(data()).square().sum().backward()
    average(net)
    sgd(net, lr=0.1 * (1 + dist.get_rank())).step()
    for parameter in net.parameters():
        dist.broadcast(parameter.data, src=0)


def joins_gradients_in_one_order() -> None:
    joins_gradients(-1)


def counts_samples_once() -> None:
    counts_samples(lambda share: len(range(dist.get_rank(), 9, dist.get_world_size())))


def gathers_samples_and_cuts_them_off() -> None:
    examples = TensorDataset(torch.arange(9.0))
    sampler: DistributedSampler[object] = DistributedSampler(examples, shuffle=False)
    with torch.no_grad():
        share = torch.cat([x for (x,) in DataLoader(examples, sampler=sampler)])
    parts = [torch.empty_like(share) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, share)
    assert torch.stack(parts, 1).flatten()[:9].equal(torch.arange(9.0))


def measures_throughput() -> None:
    examples = TensorDataset(torch.arange(9.0))
    with torch.no_grad():
        count = sum(len(x) for (x,) in DataLoader(examples, sampler=DistributedSampler(examples)))
    processed = torch.tensor(count)
    dist.all_reduce(processed)


def averages_in_a_hook_of_the_step() -> None:
    net = model()
    optimizer = sgd(net)
    optimizer.register_step_pre_hook(lambda *_: average(net))
    train(optimizer, 2, lambda: net(data()))


def averages_by_the_last_call_before_the_step() -> None:
    net = model()
    optimizer = sgd(net)
    for _ in range(2):
        optimizer.zero_grad()
        (net(data()).square().sum() / dist.get_world_size()).backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


def uses_one_branch_of_two() -> None:
    """DistributedDataParallel sums up a map of the parameters in use, equal on all ranks."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})
    net.forward = lambda x: net["a"](x)  # type: ignore[method-assign]
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    ddp(data()).square().sum().backward()
    sgd(ddp).step()


def leaves_out_a_step_and_its_gradients() -> None:
    """As a GradScaler does on all ranks, after which zero_grad() drops what was averaged."""
    ddp = DistributedDataParallel(model())
    optimizer = sgd(ddp)
    for step in range(3):
        optimizer.zero_grad()
        ddp(data()).square().sum().backward()
        if step != 1:
            optimizer.step()


def splits_a_layer_of_one_batch() -> None:
    parallelizes(shared_data())


RIGHT = [
    splits_a_layer_of_one_batch,
    trains_norms_around_split_layers,
    averages_norms_around_split_layers_at_times,
    talks_to_other_agents,
    compares_towers_of_their_own,
    uses_one_branch_of_two,
    leaves_out_a_step_and_its_gradients,
    averages_in_a_hook_of_the_step,
    averages_by_the_last_call_before_the_step,
    has_nans_of_two_kinds,
    counts_samples_once,
    gathers_samples_and_cuts_them_off,
    measures_throughput,
    joins_gradients_in_one_order,
    goes_on_alone,
    takes_the_step_of_rank_0,
    trains_heads_of_their_own,
    trains_heads_in_optimizers_of_their_own,
    trains_a_model_on_each_rank,
    trains_with_a_split_layer,
    goes_back_from_an_edge_of_the_graph,
    shards_what_begins_alike,
    asks_experts_that_begin_alike,
    trains_on_split_sequences,
    sends_tokens_to_experts_and_back,
    trains_a_layer_before_experts,
    trains_a_norm_before_split_sequences,
    gathers_tokens_for_experts,
    trains_a_head_with_a_norm_of_its_own,
    averages_only_upper_adapters,
    averages_adapters,
    trains_shards_on_parts_of_the_data,
    waits_at_several_lines,
    logs_means_of_what_each_rank_draws,
    logs_means_in_each_branch,
    sums_statistics_below_heads_with_norms,
    gathers_shards_of_a_layer,
    looks_up_rows_of_tables,
    searches_from_one_seed,
    splits_samples_alike,
    leaves_out_steps_in_a_join,
    brings_gradients_to_the_owners_of_a_shared_update,
    brings_a_few_numbers_to_the_owners_of_a_shared_update,
    goes_back_through_another_model_before_a_shared_update,
    accumulates_gradients_of_shards,
    normalizes_parts_of_sequences,
    goes_over_to_local_sgd,
    gathers_the_gradients_of_owners,
    checks_that_gradients_are_equal,
    ties_two_stages_of_a_whole_model,
    makes_one_model_more_on_rank_0,
    shuffles_everything_by_rank,
    gives_each_epoch_a_seed,
    goes_through_two_datasets_at_once,
    trains_with_ddp,
    trains_with_all_reduces,
    averages_parameters_at_times,
    averages_changes_in_an_outer_optimizer,
    averages_changes_once,
    averages_parameters_before_another_optimizer_goes_on,
    clips_each_sample,
    splits_a_layer,
    passes_stages_on,
    shards_an_optimizer,
    gathers_with_gradient,
    gathers_with_gradient_in_ddp,
    puts_its_own_part_in_place,
    takes_turns_as_root,
    goes_through_epochs,
]


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_a_right_program_gets_no_finding(program: Callable[[], None]) -> None:
    assert findings(program) == []


ON_CPU = {  # their meshes, gradient edges or numbers are on the CPU
    normalizes_parts_of_sequences,
    accumulates_gradients_of_shards,
    goes_back_from_an_edge_of_the_graph,
    shards_what_begins_alike,
    trains_shards_on_parts_of_the_data,
}


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
@pytest.mark.parametrize(
    "program",
    [program for program in RIGHT if program not in ON_CPU],
    ids=lambda program: program.__name__,
)
def test_a_right_program_gets_no_finding_on_gpus(program: Callable[[], None]) -> None:
    def on_gpu() -> None:
        with torch.device("cuda", dist.get_rank()):
            torch.cuda.set_device(dist.get_rank())
            program()

    options = Options(is_sanitized=True, semantics="nccl")
    ran = simulate(on_gpu, 2, cluster="dgx-h100", options=options)
    assert ran.findings == []
    assert ran.gpu_time is not None
    assert ran.gpu_time.wrong == []


def steps_beside_a_broadcast(mates: dist.ProcessGroup) -> None:
    used, unused = (torch.ones(2, device="cuda", requires_grad=True) for _ in range(2))
    optimizer = torch.optim.SGD([used, unused])
    used.sum().backward()
    if dist.get_rank() == 0:
        dist.broadcast(unused.data, 0, async_op=True).wait()
        optimizer.step()
        dist.send(torch.ones(1), 1, group=mates)
    else:
        dist.recv(torch.ones(1), 0, group=mates)
        dist.broadcast(unused.data, 0)


def test_a_step_waits_for_nothing_that_it_leaves_alone() -> None:
    def main() -> None:
        torch.cuda.set_device(dist.get_rank())
        dist.all_reduce(torch.ones(1, device="cuda"))
        steps_beside_a_broadcast(dist.new_group(backend="gloo"))

    simulate(main, 2, cluster="dgx-h100", options=Options(is_sanitized=True, semantics="nccl"))


def test_no_hook_stays_in_an_optimizer_whose_step_raises() -> None:
    optimizers: list[torch.optim.Optimizer] = []

    def main() -> None:
        optimizers.append(sgd(model()))
        with contextlib.suppress(ZeroDivisionError):
            optimizers[0].step(lambda: 1 / 0)

    simulate(main, 1, options=Options(is_sanitized=True))
    assert not optimizers[0]._optimizer_step_pre_hooks


def test_sums_that_each_rank_rounds_otherwise_are_no_finding() -> None:
    assert findings(trains_with_a_split_layer, 4) == []


@pytest.mark.parametrize("program", [trains_with_ddp, calls_the_module_inside])
def test_a_sanitized_run_takes_the_same_virtual_time_and_memory(
    program: Callable[[], None],
) -> None:
    plain = simulate(program, 2, cluster="dgx-h100")
    watched = simulate(program, 2, cluster="dgx-h100", options=Options(is_sanitized=True))
    assert watched.seconds == plain.seconds
    assert watched.trace.peak_bytes == plain.trace.peak_bytes


def receives_after_a_mistake(error: str) -> None:
    gathers_into_one_tensor()
    if error:
        raise ValueError(error)
    if dist.get_rank() == 0:
        dist.recv(torch.empty(1), 1)


@pytest.mark.parametrize("error", ["", "no file"])
def test_a_failed_run_tells_what_was_found_before(error: str) -> None:
    with pytest.raises(SimulationError) as caught:
        simulate(receives_after_a_mistake, 2, error, options=Options(is_sanitized=True))
    assert "found by --sanitize until then:\n  the 2 tensors that all_gather" in str(caught.value)


# Against one rank


def trains_on_parts(scale: Callable[[Tensor, int], object], seed_step: int = 0) -> None:
    net = model(seed_step * dist.get_rank())
    optimizer = sgd(net)
    for batch in torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad()
        part = batch.tensor_split(dist.get_world_size())[dist.get_rank()]
        net(part).square().mean().backward()
        for parameter in net[0].parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                scale(parameter.grad, dist.get_world_size())
        average(net[2])
        optimizer.step()


def against_one(*arguments: object, num_ranks: int = 3) -> list[str]:
    """Return what ``--against one`` prints."""
    against = beside_one(trains_on_parts, *arguments, num_ranks=num_ranks)
    return [against.lines()[0], str(against.differs)]


def beside_one(program: Callable[..., None], *arguments: object, num_ranks: int = 2) -> Against:
    """Run a program on one rank, and then on several."""
    reference = Reference()
    simulate(program, 1, *arguments, options=Options(observer=reference))
    against = Against(reference, num_ranks)
    simulate(program, num_ranks, *arguments, options=Options(observer=against))
    return against


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (
            lambda g, n: g,
            "is 3 times that on one rank, as if summed over the ranks and not divided",
        ),
        (
            lambda g, n: g.div_(n * n),
            "is 0.3333 times that on one rank, as if divided by the number of",
        ),
        (
            lambda g, n: g.div_(2 * n - (n == 1)),
            "is 0.5 times that on one rank; test_sanitizer.py:",
        ),
        (
            lambda g, n: g.mul_(n == 1),
            "differs from that on one rank (1 times its norm away, norm 0,",
        ),
    ],
)
def test_the_first_gradient_that_differs_from_one_rank_is_named(scale: Any, expected: str) -> None:
    found, differs = against_one(scale)
    assert found.startswith(f"step 1: the gradient of 0.weight on rank 0 of 3 {expected}")
    assert differs == "True"


def test_what_equals_one_rank_is_said() -> None:
    assert against_one(lambda g, n: g.div_(n)) == [
        "2 steps compared: all equal those of one rank",
        "False",
    ]


def trains_a_slice() -> None:
    slice_ = nn.Linear(4, 6 // dist.get_world_size())
    slice_(data()).sum().backward()
    sgd(slice_).step()


def test_slices_are_not_compared_with_one_rank() -> None:
    against = beside_one(trains_a_slice)
    assert against.lines() == [
        "nothing was compared: one rank took 1 step, with other parameters",
        "not compared: 2 steps of ranks 0 and 1, with other parameters than one rank",
    ]
    assert against.differs  # or a script that asks would take it for equal


class Keyed(nn.Module):
    """Attention, whose gradient of the key's bias is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.words = nn.Embedding(4, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.words(torch.arange(4))
        return (self.query(x) @ self.key(x).mT).softmax(-1) @ x


def trains_attention(num_steps: Callable[[int], int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, size, rank = Keyed().to(dtype), dist.get_world_size(), dist.get_rank()
    dense = [net.words.weight]
    adam = torch.optim.Adam([p for p in net.parameters() if p is not net.words.weight], lr=0.01)
    sparse = torch.optim.SparseAdam(dense, lr=0.01)
    for batch in torch.randn(num_steps(size), 4, 4, 8, dtype=dtype):
        net.zero_grad()
        net(batch.tensor_split(size)[rank]).square().mean().backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            gradient = parameter.grad.to_dense()
            dist.all_reduce(gradient)
            gradient /= size
            is_sparse = parameter.grad.is_sparse
            parameter.grad = gradient.to_sparse(1) if is_sparse else gradient
        adam.step()
        sparse.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    against = beside_one(trains_attention, lambda size: 10, dtype)
    assert against.lines() == ["20 steps compared: all equal those of one rank"]
    assert not against.differs


def test_another_number_of_steps_is_a_difference() -> None:
    against = beside_one(trains_attention, lambda size: 3 + size, torch.float32)
    assert against.lines() == [
        "8 steps compared: all equal those of one rank",
        "rank 0 of 2 took 5 steps, and one rank 4",
    ]
    assert against.differs


def test_other_weights_at_the_start_are_the_first_difference() -> None:
    found, _ = against_one(lambda g, n: g.div_(n), 1)
    assert found.startswith("step 1: 0.weight on rank 1 of 3 differs from that on one rank")
