"""The hand-written optimizers of the judges' references take the same steps as torch's."""

from typing import Any

import pytest
import torch
from torch import nn

from judging.models import FLAG, SGD, AdamW, Worn, batch, state_of, trainable


def _sgd(module: nn.Module, settings: dict[str, float]) -> tuple[Any, Any]:
    return SGD(module, 0.5, **settings), torch.optim.SGD(trainable(module), 0.5, **settings)


def _adamw(module: nn.Module, settings: dict[str, float]) -> tuple[Any, Any]:
    return AdamW(module, 0.5, **settings), torch.optim.AdamW(trainable(module), 0.5, **settings)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (_sgd, {}),
        (_sgd, {"momentum": 0.9, "weight_decay": 0.01}),
        (_adamw, {"weight_decay": 0.0}),
        (_adamw, {"weight_decay": 0.1}),
    ],
)
def test_steps_are_those_of_torch(make: Any, settings: dict[str, float]) -> None:
    states = []
    for place in range(2):
        model = Worn()
        optimizer = make(model, settings)[place]
        for step in range(4):
            x, _ = batch((6,), step)
            x[:1, :1] = FLAG if step % 2 else 0.0  # every other step, one parameter has no gradient
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        states.append(state_of(model))
    for name, values in states[1].items():
        assert states[0][name] == pytest.approx(values, rel=1e-9, abs=1e-9)
