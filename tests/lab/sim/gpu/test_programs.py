"""Programs on GPUs compute what they compute on CPUs, and are accused of nothing."""

import io
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, mse_loss, relu
from torch.nn.parallel import DistributedDataParallel
from torch.utils._device import _device_constructors
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from zero_redundancy import ZeroRedundancyOptimizer

from distlab.sim import Cluster, Options, simulate

Program = Callable[[torch.device], Any]


def flat(values: Any) -> list[Tensor]:
    """Return all tensors of a result on the CPU."""
    if isinstance(values, DTensor):
        values = values.full_tensor()
    if isinstance(values, Tensor):
        return [values.detach().cpu().clone()]
    return [tensor for value in values for tensor in flat(value)]


def run(program: Program, num_ranks: int, kind: str) -> Any:
    def main() -> list[Tensor]:
        torch.manual_seed(0)
        if kind == "cpu":
            return flat(program(torch.device("cpu")))
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        return flat(program(torch.device("cuda", local)))

    semantics = "gloo" if kind == "cpu" else "nccl"
    cluster = Cluster.preset("dgx-h100")
    return simulate(main, num_ranks, cluster=cluster, options=Options(semantics=semantics))


def assert_same(program: Program, num_ranks: int = 2) -> None:
    on_cpus, on_gpus = run(program, num_ranks, "cpu"), run(program, num_ranks, "cuda")
    assert on_gpus.gpu_time.wrong == []
    assert all(rank.num_kernels for rank in on_gpus.gpu_time.ranks)
    for cpus, gpus in zip(on_cpus.results, on_gpus.results, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(cpus, gpus, strict=True))


def mlp(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 4)).to(
        device
    )


def batch(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    x = torch.randn(8, 16, generator=generator)
    return x.to(device), x[:, :4].argmax(1).to(device)


def train(model: nn.Module, optimizer: Any, device: torch.device, steps: int = 3) -> list[Any]:
    for _ in range(steps):
        x, y = batch(device)
        optimizer.zero_grad()
        cross_entropy(model(x).float(), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [*model.parameters()]


def ddp(model: nn.Module, device: torch.device, **options: Any) -> DistributedDataParallel:
    ids = None if device.type == "cpu" else [device.index]
    return DistributedDataParallel(model, device_ids=ids, **options)


class Halves(nn.Module):
    """Each rank uses another half of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return self.halves[dist.get_rank()](x)


@pytest.mark.parametrize("option", ["static_graph", "gradient_as_bucket_view", "with_hook"])
def test_ddp(option: str) -> None:
    def program(device: torch.device) -> Any:
        options = {} if option == "with_hook" else {option: True}
        model = ddp(mlp(device), device, bucket_cap_mb=0.001, **options)
        if option == "with_hook":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return train(model, torch.optim.AdamW(model.parameters()), device)

    assert_same(program)


def test_a_hook_that_makes_a_future_of_a_gpu_as_torch_asks() -> None:
    def halve(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(2)
        devices = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        future.set_result(buffer)
        return future

    def program(device: torch.device) -> Any:
        model = ddp(mlp(device), device, bucket_cap_mb=0.001)
        model.register_comm_hook(None, halve)
        return train(model, torch.optim.SGD(model.parameters(), 0.1), device)

    assert_same(program)


def test_ddp_with_gradients_in_bfloat16() -> None:
    """On the CPU, torch refuses this hook."""

    def check(device: torch.device) -> None:
        model = ddp(mlp(device), device)
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        before = [parameter.clone() for parameter in model.parameters()]
        after = train(model, torch.optim.SGD(model.parameters(), 0.1), device)
        assert not any(torch.equal(x, y) for x, y in zip(before, after, strict=True))

    on_gpu(check)


def test_ddp_of_a_model_with_unused_parameters() -> None:
    def program(device: torch.device) -> Any:
        model = ddp(Halves().to(device), device, find_unused_parameters=True)
        return train(model, torch.optim.SGD(model.parameters(), 0.1), device)

    assert_same(program)


def test_trainer_with_loader_and_checkpoint() -> None:
    def program(device: torch.device) -> Any:
        x, y = torch.randn(16, 16), torch.arange(16) % 4
        data = TensorDataset(x, y)
        pins = device.type == "cuda"
        loader = DataLoader(data, 4, sampler=DistributedSampler(data), pin_memory=pins)
        model = ddp(mlp(device), device)
        optimizer, meter = torch.optim.AdamW(model.parameters()), torch.zeros(2, device=device)
        for images, classes in loader:
            images = images.to(device, non_blocking=True)
            classes = classes.to(device, non_blocking=True)
            output = checkpoint(model, images, use_reentrant=False)
            loss = cross_entropy(output, classes)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            meter[0] += loss.detach()
            meter[1] += (output.argmax(1) == classes).float().mean()
        dist.all_reduce(meter)
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        saved = torch.load(file, map_location=device)
        assert {tensor.device for tensor in saved[0].values()} == {device}
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return [*train(model, optimizer, device, 1), meter]

    assert_same(program)


def test_zero_redundancy_optimizer() -> None:
    def program(device: torch.device) -> Any:
        model = ddp(mlp(device), device)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
        trained = train(model, optimizer, device)
        optimizer.consolidate_state_dict(0)
        return trained

    assert_same(program)


def test_fully_shard_in_16_bits() -> None:
    def program(device: torch.device) -> Any:
        mesh, model = init_device_mesh(device.type, (2,)), mlp(device)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in model[::2]:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return train(model, torch.optim.AdamW(model.parameters()), device, 2)

    assert_same(program)


def test_tensor_parallel_in_a_part_of_the_ranks() -> None:
    def program(device: torch.device) -> Any:
        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("data", "tensor"))
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(device)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).to(device)
        model(x).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_same(program, 4)


def test_pipeline() -> None:
    def program(device: torch.device) -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(size)]
        stage = PipelineStage(layers[rank].to(device), rank, size, device)
        schedule = Schedule1F1B(stage, 4, loss_fn=mse_loss)
        x, losses = torch.randn(8, 16).to(device), list[Tensor]()
        if rank == 0:
            schedule.step(x)
        else:
            last = {"target": x, "losses": losses} if rank == size - 1 else {}
            schedule.step(**last)
        return [losses, [parameter.grad for parameter in stage.submod.parameters()]]

    assert_same(program, 3)


def test_messages_in_rings() -> None:
    def program(device: torch.device) -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        right, left = (rank + 1) % size, (rank - 1) % size
        buffer = torch.arange(8.0, device=device) + rank
        total, incoming = buffer.clone(), torch.empty_like(buffer)
        for _ in range(size - 1):
            sends, receives = (
                partial(dist.isend, buffer, right),
                partial(dist.irecv, incoming, left),
            )
            # The first message of two ranks makes their communicator, for which both hosts wait.
            works = [call() for call in ((receives, sends) if rank % 2 else (sends, receives))]
            for work in works:
                work.wait()
            total += incoming
            buffer.copy_(incoming)
        found: list[Any] = [None] * size
        dist.all_gather_object(found, rank)
        assert found == [*range(size)]
        return total

    assert_same(program, 3)


def test_model_on_two_gpus_of_a_rank() -> None:
    def program(device: torch.device) -> Any:
        other = torch.device("cuda", device.index + 2) if device.type == "cuda" else device
        first, last = nn.Linear(16, 16).to(device), nn.Linear(16, 4).to(other)
        x, y = batch(device)
        cross_entropy(last(relu(first(x)).to(other)), y.to(other)).backward()
        assert first.weight.grad is not None
        assert first.weight.grad.device == device
        return [first.weight.grad, last.weight.grad]

    assert_same(program)


def test_gradients_of_a_sparse_embedding() -> None:
    def program(device: torch.device) -> Any:
        model = nn.Sequential(nn.Embedding(10, 16, sparse=True), nn.Linear(16, 4)).to(device)
        tokens = torch.arange(8).to(device)
        cross_entropy(model(tokens), tokens % 4).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        return [*model.parameters()]

    assert_same(program)


class CausalAttention(nn.Module):
    """Attention without parameters, over the two halves of each row."""

    def forward(self, x: Tensor) -> Any:
        halves = x.view(4, 2, 2, 8)
        return nn.functional.scaled_dot_product_attention(
            halves, halves, halves, dropout_p=0.1, is_causal=True
        ).reshape(x.shape)


def test_causal_attention_with_dropout() -> None:
    def program(device: torch.device) -> Any:
        model = ddp(nn.Sequential(nn.Linear(16, 16), CausalAttention()).to(device), device)
        return train(model, torch.optim.SGD(model.parameters(), 0.1), device)

    assert_same(program)


def on_gpu(check: Callable[[torch.device], object]) -> None:
    """Run a check on one rank that has a GPU."""

    def main() -> None:
        check(torch.device("cuda", 0))

    simulate(main, 1, cluster=Cluster.preset("dgx-h100"), options=Options(semantics="nccl"))


attend = partial(nn.functional.scaled_dot_product_attention, dropout_p=0.1, is_causal=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: nn.functional.one_hot(x.long(), 4),
        lambda x: x.softmax(0, dtype=torch.float64),
        lambda x: nn.utils.rnn.pad_sequence([x, x]),
        lambda x: x.quantile(0.5),
        lambda x: torch.inference_mode()(attend)(x.view(1, 3, 1), x.view(1, 3, 1), x.view(1, 3, 1)),
        lambda x: torch.linalg.matrix_rank(x.view(3, 1)),
        lambda x: attend(query=x.view(1, 3, 1), key=x.view(1, 3, 1), value=x.view(1, 3, 1)),
        lambda x: x.new(2),
        lambda _: torch.ones(2).to(0),
        lambda _: torch.zeros(2, device=0),
        lambda _: torch.ones(2).type(torch.cuda.FloatTensor),
        lambda _: torch.cuda.FloatTensor([1.0]),
        lambda x: x.clone().untyped_storage(),
        lambda _: nn.Linear(2, 2).to(0).weight,
    ],
)
def test_results_stay_on_the_gpu(make: Callable[[Tensor], Any]) -> None:
    def check(device: torch.device) -> None:
        assert make(torch.ones(3, device=device)).device == device

    on_gpu(check)


def test_default_device() -> None:
    def check(device: torch.device) -> None:
        with torch.device("cuda"):
            made = [torch.ones(2), torch.tensor([1.0]), nn.Linear(2, 2).weight]
        assert {tensor.device for tensor in made} == {device}
        assert torch.tensor([1.0]).device.type == "cpu"

    on_gpu(check)


def test_default_devices_hold_after_the_first_world_of_a_process() -> None:
    _device_constructors.cache_clear()
    on_gpu(lambda _: None)
    with torch.device("meta"):
        assert torch.tensor([1.0]).device.type == "meta"


def test_versions_and_properties_of_gpus() -> None:
    def check(device: torch.device) -> None:
        assert torch.version.cuda == "12.8"
        assert torch.cuda.get_arch_list() == ["sm_90"]
        assert "multi_processor_count=132" in repr(torch.cuda.get_device_properties(device))

    on_gpu(check)
    assert torch.version.cuda is None


def test_classes_of_streams_events_and_tensors() -> None:
    def check(device: torch.device) -> None:
        assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
        assert isinstance(torch.cuda.Stream(), torch.Stream)
        assert isinstance(torch.cuda.Event(), torch.Event)
        x = torch.ones(2, device=device)
        assert isinstance(x, torch.cuda.FloatTensor)
        assert not isinstance(x, torch.cuda.LongTensor)

    on_gpu(check)
