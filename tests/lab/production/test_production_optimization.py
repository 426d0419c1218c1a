"""Exact learning rates, and the mean of the parameters checked against a plain formula."""

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from picture_folders import quick
from torch import nn

from distlab.production.optimization import (
    ModelMean,
    TensorMean,
    lr_at,
    peak_lr,
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


def test_the_rate_follows_from_the_place_of_the_sampler() -> None:
    config = quick(epochs=2, lr=0.4, lr_batch_size=64)
    place = Mock(num_samples=10 * 64 - 1, global_batch=64, epoch=0, position=3 * 64)
    assert lr_at(config, place) == pytest.approx(0.4 * 4 / 10)
    place.epoch, place.position = 1, 0
    assert lr_at(config, place) == pytest.approx(0.4)
    place.position = 5 * 64
    assert lr_at(config, place) == pytest.approx(0.2)


@pytest.mark.parametrize(("batch_size", "lr"), [(256, 0.1), (1024, 0.4), (64, 0.025)])
def test_the_rate_is_linear_in_the_batch(batch_size: int, lr: float) -> None:
    assert peak_lr(quick(lr=0.1, batch_size=batch_size)) == pytest.approx(lr)


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
