"""sharding_strategy auto chooses a ZeRO stage by memory; stage 1 also works in split models."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn

from distlab.production import sharding
from distlab.production.config import Config, make_config
from distlab.production.lessons import find_lessons
from distlab.production.models import build_model
from distlab.production.sharding import state_bytes
from distlab.production.strategies import parallelise

SMALL = {"model": "transformer", "data": "synthetic", "image_size": 8, "device": "cpu"}
COURSE = {**SMALL, "strategy": "course", "sharding_strategy": "auto"}
PARAMETERS = 1000
IMAGES = 16


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = nn.functional.cross_entropy(logits, targets, reduction="sum")
    return loss


# --- choosing the stage --------------------------------------------------------------------------


def chosen(memory: float, **keys: Any) -> int:
    """Return the stage chosen by a rank that has ``memory`` bytes for its states."""
    sharding._machine_memory = lambda: 2 * memory * dist.get_world_size()
    model = nn.Linear(PARAMETERS, 1, bias=False)
    return sharding.choose_stage(make_config({**COURSE, **keys}, "test"), model).zero_redundancy


def stages(*cases: tuple[float, dict[str, Any]]) -> list[int]:
    return [chosen(memory, **keys) for memory, keys in cases]


def test_the_lowest_stage_that_fits_is_chosen() -> None:
    # SGD with momentum on 2 ranks: 12, 10, 8 and 6 bytes per parameter in stages 0 to 3
    sizes = [12_000, 11_999, 10_000, 9_999, 8_000, 7_999, 6_000, 1]
    cases = [(float(size), dict[str, Any]()) for size in sizes]
    for result in on_ranks(stages, 2, *cases):
        assert result == [0, 1, 1, 2, 2, 3, 3, 3]


def test_what_is_given_stays() -> None:
    cases: list[tuple[float, dict[str, Any]]] = [
        (1e9, {"zero_redundancy": True}),  # True asks for stage 1 or higher
        (1e9, {"zero_redundancy": 3}),
        (1.0, {"sharding_strategy": "manual", "zero_redundancy": 2}),
        (1.0, {"pipeline_parallelism": 2}),
        (1.0, {"tensor_parallelism": 2, "zero_redundancy": 1}),
        (1.0, {"compression": "int8"}),
        (1.0, {"decay_norms": False}),
        (1.0, {"communication_pattern": "ring"}),
        (1.0, {"communication_pattern": "tree"}),
        (1.0, {"communication_pattern": "parameter_server"}),
        (1.0, {"strategy": "ddp"}),
    ]
    for result in on_ranks(stages, 2, *cases):
        assert result == [1, 3, 2, 0, 1, 0, 0, 1, 0, 0, 0]


def least(num_bytes: list[float]) -> float:
    sharding._machine_memory = lambda: num_bytes[dist.get_rank()]
    return sharding._least_memory(torch.device("cpu"))


def test_all_ranks_agree_where_one_has_less_memory() -> None:
    assert on_ranks(least, 2, [4000.0, 1000.0]) == [500.0, 500.0]


@pytest.mark.parametrize(
    ("keys", "bytes_by_stage"),
    [
        ({}, [12, 9, 6, 3]),
        ({"optimizer": "adamw"}, [16, 10, 7, 4]),
        ({"momentum": 0}, [8, 8, 5, 2]),
        ({"ema_decay": 0.9}, [16, 13, 10, 4]),
    ],
)
def test_bytes_of_the_states_on_four_ranks(keys: Any, bytes_by_stage: list[int]) -> None:
    config = make_config({**COURSE, **keys}, "test")
    assert [state_bytes(1, stage, 4, config) for stage in range(4)] == bytes_by_stage


# --- stage 1 in combination ----------------------------------------------------------------------


def losses(keys: dict[str, Any]) -> list[float]:
    """Train three steps; return each step's loss, summed over the replicas of the last stage."""
    config = make_config({**COURSE, "optimizer": "adamw", "lr": 0.01, **keys}, "test")
    model = build_model(config, 10, torch.device("cpu"))
    strategy = parallelise(model, config, loss_sum, find_lessons("solution", config))
    results = []
    for step in range(3):
        images, labels = batch(config, step)
        rank, number = dist.get_rank(strategy.replicas), strategy.num_replicas
        mine = (tensor.tensor_split(number)[rank] for tensor in (images, labels))
        strategy.zero_grad()
        loss = strategy.forward_backward(*mine, num_samples=IMAGES)
        strategy.average_gradients()
        strategy.step()
        dist.all_reduce(loss, group=strategy.replicas)
        results.append(float(loss))
    return results


def batch(config: Config, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    side = config.image_size
    images = torch.randn(IMAGES, 3, side, side, generator=generator)
    return images, torch.randint(10, (IMAGES,), generator=generator)


def test_a_ring_reduces_the_gradients_of_stage_1() -> None:
    ((*expected,),) = on_ranks(losses, 1, {})
    keys = {"zero_redundancy": 1, "communication_pattern": "ring"}
    for result in on_ranks(losses, 3, keys):
        assert result == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("split", ["pipeline_parallelism", "tensor_parallelism"])
def test_replicas_of_a_split_model_share_the_optimizer(split: str) -> None:
    ((*expected,),) = on_ranks(losses, 1, {})
    keys = {split: 2, "zero_redundancy": 1, "communication_pattern": "ring"}
    for result in on_ranks(losses, 4, keys):
        assert result == pytest.approx(expected, rel=1e-4)
