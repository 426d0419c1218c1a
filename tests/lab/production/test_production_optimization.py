"""The learning rate by numbers, and the mean of the parameters against a plain formula."""

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from picture_folders import quick
from torch import nn

from distlab.production.config import Config
from distlab.production.optimization import (
    ModelMean,
    TensorMean,
    lr_at,
    optimizer_of,
    peak_lr,
    set_lr,
    share_of_lr,
)


def shares(steps_per_epoch: int, **changes: Any) -> list[float]:
    config = quick(**changes)
    number = config.epochs * steps_per_epoch
    return [share_of_lr(config, steps_per_epoch, step) for step in range(number)]


# --- the learning rate ---------------------------------------------------------------------------


def test_the_rate_grows_linearly_and_falls_along_a_cosine() -> None:
    fall = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    assert shares(4, epochs=2) == pytest.approx([0.25, 0.5, 0.75, 1.0, *fall])
    assert [round(share, 2) for share in shares(4, epochs=2)][4:] == [1, 0.85, 0.5, 0.15]


def test_a_warm_up_may_take_a_part_of_an_epoch_or_none() -> None:
    assert shares(4, epochs=1, warmup_epochs=0.5)[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert shares(4, epochs=1, warmup_epochs=0)[0] == 1.0
    assert shares(2, epochs=2, warmup_epochs=2) == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1.0])


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_step_may_lie_between_two(schedule: str) -> None:
    config = quick(epochs=2, schedule=schedule)
    between = [share_of_lr(config, 4, 0.5 * step) for step in range(16)]
    for before, here, after in zip(between[:6], between[1:7], between[2:8], strict=True):
        assert before <= here <= after <= 1.0
    assert min(between) > 0


def test_the_rate_follows_from_the_place_of_the_sampler() -> None:
    config = quick(epochs=2, lr=0.4, lr_batch_size=64)
    place = Mock(num_samples=10 * 64 - 1, global_batch=64, epoch=0, position=3 * 64)
    assert lr_at(config, place) == pytest.approx(0.4 * 4 / 10)
    place.epoch, place.position = 1, 0
    assert lr_at(config, place) == pytest.approx(0.4)
    place.position = 5 * 64
    assert lr_at(config, place) == pytest.approx(0.2)


def test_a_constant_rate_stays_after_the_warm_up() -> None:
    assert shares(2, epochs=3, schedule="constant") == pytest.approx([0.5, 1, 1, 1, 1, 1])


def test_a_warm_up_alone_divides_by_nothing() -> None:
    assert share_of_lr(quick(epochs=1, warmup_epochs=1), 4, 4) == pytest.approx(1.0)


@pytest.mark.parametrize(("batch_size", "lr"), [(256, 0.1), (1024, 0.4), (64, 0.025)])
def test_the_rate_is_linear_in_the_batch(batch_size: int, lr: float) -> None:
    assert peak_lr(quick(lr=0.1, batch_size=batch_size)) == pytest.approx(lr)


def test_the_rate_is_that_of_another_batch_if_asked_for() -> None:
    assert peak_lr(quick(lr=0.1, lr_batch_size=64, batch_size=64)) == pytest.approx(0.1)


def made(config: Config) -> torch.optim.Optimizer:
    kind, options = optimizer_of(config)
    return kind([nn.Parameter(torch.ones(2))], **options)


def test_optimizers_are_made_as_configured() -> None:
    sgd = made(quick(optimizer="sgd", momentum=0.8, weight_decay=0.01, lr=0.5, batch_size=128))
    adamw = made(quick(optimizer="adamw", weight_decay=0.02, lr=0.5, batch_size=512))
    assert isinstance(sgd, torch.optim.SGD)
    assert isinstance(adamw, torch.optim.AdamW)
    (group,) = sgd.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.25, 0.8, 0.01)
    (group,) = adamw.param_groups
    assert (group["lr"], group["weight_decay"]) == (1.0, 0.02)


def test_the_rate_is_set_in_all_groups() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [p], "lr": 9.0} for p in parameters])
    set_lr(optimizer, 0.3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.3]


# --- the mean of the parameters ------------------------------------------------------------------


def values(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    shape = (number, 3)
    return list(torch.randn(shape, generator=generator, dtype=torch.float64))


def of_values(decay: float, rows: list[torch.Tensor]) -> tuple[TensorMean, torch.Tensor]:
    parameter = nn.Parameter(rows[0].clone())
    mean = TensorMean([parameter])
    for row in rows[1:]:
        parameter.data.copy_(row)
        mean.update(decay)
    return mean, parameter


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("number", [1, 2, 12, 60])
def test_the_mean_is_a_weighted_sum_of_all_parameters(decay: float, number: int) -> None:
    rows = values(number)
    decays = [min(decay, (1 + k) / (10 + k)) for k in range(1, number)]
    weights = [1.0, *(1 - d for d in decays)]
    weights = [w * math.prod(decays[place:]) for place, w in enumerate(weights)]
    expected = sum(w * row for w, row in zip(weights, rows, strict=True))
    mean, _ = of_values(decay, rows)
    assert sum(weights) == pytest.approx(1.0)
    assert torch.allclose(mean.means[0], torch.as_tensor(expected), rtol=1e-12)


def test_the_first_steps_forget_the_random_start() -> None:
    mean, _ = of_values(0.9999, [torch.tensor([1000.0]), *[torch.tensor([1.0])] * 50])
    assert abs(float(mean.means[0]) - 1.0) < 1e-3


def test_the_model_has_the_means_meanwhile_and_itself_back() -> None:
    module = nn.BatchNorm1d(2)
    mean = ModelMean(module, 0.5)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module(torch.randn(8, 2) + 3)
    module.weight.data += 1
    mean.update()
    trained = {name: value.clone() for name, value in module.state_dict().items()}
    with mean.in_place():
        share = 1 - 2 / 11  # after one step
        for name in ("weight", "running_mean", "running_var"):
            expected = torch.lerp(before[name], trained[name], share)
            assert torch.allclose(module.state_dict()[name], expected)
        assert int(module.num_batches_tracked or 0) == 1
    assert_same(module, trained)
    with pytest.raises(RuntimeError, match="in an evaluation"), mean.in_place():
        raise RuntimeError("in an evaluation")
    assert_same(module, trained)


def assert_same(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, value in module.state_dict().items():
        assert torch.equal(value, values[name])


def test_a_mean_goes_on_from_its_state() -> None:
    rows = values(9)
    straight, _ = of_values(0.7, rows)
    first, _ = of_values(0.7, rows[:4])
    parameter = nn.Parameter(rows[3].clone())
    resumed = TensorMean([parameter])
    resumed.load_state_dict(first.state_dict())
    for row in rows[4:]:
        parameter.data.copy_(row)
        resumed.update(0.7)
    assert torch.equal(resumed.means[0], straight.means[0])
    assert first.num_updates == 3


def test_without_a_decay_there_is_no_mean() -> None:
    module = nn.Linear(2, 2)
    mean = ModelMean(module, 0.0)
    module.weight.data.fill_(7)
    mean.update()
    with mean.in_place():
        assert float(module.weight.detach().min()) == 7
