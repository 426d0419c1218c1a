"""The trainer does what keeps GPUs busy, as far as a CPU can show it: memory, shapes, waiting."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from little_runs import NUM_TEST, Case, little, losses_in, plain, started
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.production import checkpoint_files, world
from distlab.production.errors import ConfigError
from distlab.production.evaluation import evaluate
from distlab.production.saving import Checkpoints
from judging.pretend_device import PretendDevice, device_of
from solutions.phase3_multi_node.ddp import DistributedDataParallel
from solutions.phase4_production.imagenet_trainer import Training

COURSE = {"strategy": "course"}


def trained(run_dir: Path, **changes: Any) -> Training:
    """Return a run after its last step."""
    training = started(little(run_dir, **changes))
    training.run()
    return training


# --- the process group ---------------------------------------------------------------------------


@pytest.mark.parametrize(("heartbeat_s", "limit_s"), [(300.0, 1800.0), (7200.0, 7200.0)])
@pytest.mark.parametrize("launched", [False, True])
def test_nccl_gets_its_gpu_and_waits_longer_than_the_heartbeat(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heartbeat_s: float,
    limit_s: float,
    launched: bool,
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(world, "_device", lambda config: gpu)
    monkeypatch.setattr(world, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.delenv("RANK", raising=False)
    if launched:
        monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(dist, "init_process_group", joining := mock.Mock())
    monkeypatch.setattr(dist, "destroy_process_group", mock.Mock())
    with world.joined(little(tmp_path, heartbeat_timeout_s=heartbeat_s)) as device:
        assert device == gpu
    options = joining.call_args.kwargs
    assert options["device_id"] == gpu
    assert options["timeout"].total_seconds() == limit_s


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # of the class token
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", [{}, {"accumulate": 3}, {"compression": "top_k"}], ids=str)
def test_gradients_are_views_of_the_buckets(tmp_path: Path, case: Case) -> None:
    module = trained(tmp_path / "run", **case).strategy.module
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == 1


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", [{}, COURSE, {**COURSE, "compression": "power_sgd"}], ids=str)
def test_gradients_are_laid_out_like_their_parameters(tmp_path: Path, case: Case) -> None:
    images: Case = {"model": "resnet18", "image_size": 16, "channels_last": True, "epochs": 1}
    module = trained(tmp_path / "run", **images, **case).strategy.module
    strides = {name: p.stride() for name, p in module.named_parameters()}
    assert {n: p.grad.stride() for n, p in module.named_parameters() if p.grad is not None} == (
        strides
    )


@pytest.mark.usefixtures("alone")
def test_a_parameter_with_gaps_gets_a_gradient_without() -> None:
    module = nn.Linear(4, 2, bias=False)
    module.weight = nn.Parameter(torch.ones(2, 8)[:, ::2])
    ddp = DistributedDataParallel(module)
    ddp(torch.arange(4.0)).sum().backward()
    ddp.finish_gradient_synchronization()
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[0.0, 1.0, 2.0, 3.0]] * 2
    assert module.weight.grad.is_contiguous()


def test_of_repeated_images_only_the_first_ones_count(alone: None, tmp_path: Path) -> None:
    config = {"accumulate": 3, "label_smoothing": 0.5}
    training = started(little(tmp_path / "run", **config))
    strategy = training.strategy
    images, targets = torch.randn(2, 3, 8, 8), torch.tensor([[1.0, 0, 0, 0], [0, 0, 0.5, 0.5]])
    with training.telemetry:  # closes its files
        expected = strategy.loss_sum(strategy.module(images), targets).item()
        assert strategy.forward_backward(images, targets, 2).item() == pytest.approx(expected)


# --- torch.compile -------------------------------------------------------------------------------

reads_grad = pytest.mark.filterwarnings("ignore:The .grad attribute")  # pytest's logging does


class Compiler:
    """A compiler that leaves graphs as they are, and notes the shapes of their inputs."""

    def __init__(self) -> None:
        self.shapes: list[Any] = []

    def __call__(self, graph: Any, inputs: list[Any]) -> Any:
        self.shapes.append([tuple(x.shape) for x in inputs if isinstance(x, Tensor)])
        return graph.forward


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    noting = Compiler()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=noting))
    yield noting
    torch._dynamo.reset()


COMPILED: dict[str, Case] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "course accumulates": {**COURSE, "accumulate": 3},
    "zero 1": {**COURSE, "zero_redundancy": 1},
    "zero 2": {**COURSE, "zero_redundancy": 2},
}


@reads_grad
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", COMPILED.values(), ids=COMPILED)
def test_all_graphs_are_compiled_before_the_first_step(
    tmp_path: Path, compiler: Compiler, case: Case
) -> None:
    training = started(little(tmp_path / "run", compile=True, **case))
    before = [*compiler.shapes]
    assert before
    training.run()
    assert compiler.shapes == before
    assert losses_in(tmp_path / "run") == pytest.approx(plain(tmp_path)["losses"], rel=1e-4)


@reads_grad
@pytest.mark.usefixtures("alone")
def test_sides_of_progressive_resize_are_compiled_too(tmp_path: Path, compiler: Compiler) -> None:
    resized: Case = {"model": "resnet18", "image_size": 24, "progressive_resize": {0: 16, 1: 24}}
    training = started(little(tmp_path / "run", compile=True, channels_last=True, **resized))
    before = [*compiler.shapes]
    assert before
    training.run()
    assert compiler.shapes == before


@pytest.mark.usefixtures("alone")
def test_zero_3_is_not_compiled(tmp_path: Path, compiler: Compiler) -> None:
    with pytest.raises(ConfigError, match="leave compile out"):
        started(little(tmp_path / "run", compile=True, zero_redundancy=3, **COURSE))


# --- states and evaluations ----------------------------------------------------------------------


def test_what_is_kept_meanwhile_is_on_the_cpu() -> None:
    checkpoints: Any = Checkpoints.__new__(Checkpoints)
    with PretendDevice() as device:
        value = torch.ones(3, device=device)
        checkpoints.own_state = mock.Mock(state_dict=lambda: {"parts": [{"value": value}]})
        with checkpoints.unchanged():
            value.zero_()
        [(state,)] = [call.args for call in checkpoints.own_state.load_state_dict.call_args_list]
        kept = state["parts"][0]["value"]
        assert device_of(kept) == torch.device("cpu")
        assert kept.tolist() == [1.0] * 3


@pytest.mark.usefixtures("alone")
def test_a_state_that_is_loaded_is_not_sent_by_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = trained(tmp_path / "run").checkpoints.files
    of_cpus = dist.new_group()
    monkeypatch.setattr(checkpoint_files, "control_group", lambda: of_cpus)
    monkeypatch.setattr(
        dist, "broadcast_object_list", sending := mock.Mock(wraps=dist.broadcast_object_list)
    )
    assert files.find() is not None
    assert [call.kwargs.get("group") for call in sending.call_args_list] == [of_cpus]


class Reads(TorchDispatchMode):
    """Counts how often a number is read from a tensor, for which a GPU has to finish its work."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("alone")
def test_an_evaluation_reads_no_number_of_a_batch(tmp_path: Path) -> None:
    counts = []
    for batch_size in (1, 8):
        training = started(little(tmp_path / f"{batch_size}", batch_size=batch_size))
        with training.telemetry, Reads() as reads:
            evaluate(*_of_evaluation(training))
        counts.append(reads.count)
    assert counts[0] == counts[1]


def _of_evaluation(training: Training) -> tuple[Any, ...]:
    return training.strategy, training.test_samples, training.config, training.mean, mock.Mock()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("every", "agreements"), [(1, NUM_TEST), (3, 3), (10, 1)])
def test_ranks_agree_on_stopping_as_often_as_in_training(
    tmp_path: Path, every: int, agreements: int
) -> None:
    training = started(little(tmp_path / "run", batch_size=1))
    training.telemetry.steps_per_agreement = every
    training.stop.agreed = agreed = mock.Mock(return_value=False)
    with training.telemetry:
        training.evaluate()
    assert agreed.call_count == agreements
