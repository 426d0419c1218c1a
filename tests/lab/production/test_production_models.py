"""The trainer's models have torchvision's parameters, and give the same results layer by layer."""

from typing import Any

import pytest
import torch
from picture_folders import quick
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from distlab.production.models import (
    build_model,
    layer_flops,
    layers_of,
    split_heads,
)
from distlab.torchvision_repair import import_torchvision

MODELS = [("resnet18", 16), ("resnet18", 72), ("transformer", 16), ("cnn", 16)]


def built(name: str, side: int, num_classes: int = 10, seed: int = 0) -> nn.Module:
    config = quick(model=name, image_size=side, seed=seed)
    return build_model(config, num_classes, torch.get_default_device())


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "own", "published"),
    [
        ("resnet18", "resnet18", 11_689_512),
        ("resnet50", "resnet50", 25_557_032),
        ("vit_b16", "vit_b_16", 86_567_656),
        ("vit_s16", None, 22_050_664),
    ],
)
def test_models_have_the_parameters_of_torchvision(
    name: str, own: str | None, published: int
) -> None:
    with torch.device("meta"):
        model = built(name, 224, num_classes=1000)
        assert size_of(model) == published
        if own:
            theirs = getattr(import_torchvision().models, own)()
            shapes = {key: value.shape for key, value in theirs.state_dict().items()}
            assert {key: value.shape for key, value in model.state_dict().items()} == shapes


@pytest.mark.parametrize(("side", "kernel", "inside"), [(16, 3, 2), (64, 3, 8), (72, 7, 3)])
def test_small_images_enter_a_resnet_as_they_are(side: int, kernel: int, inside: int) -> None:
    with torch.device("meta"):
        model: Any = built("resnet18", side)
        assert model.conv1.kernel_size == (kernel, kernel)
        sides: list[int] = []
        model.layer4.register_forward_hook(lambda *call: sides.append(call[2].shape[-1]))
        assert model(torch.zeros(1, 3, side, side)).shape == (1, 10)
        assert sides == [inside]


# --- layers --------------------------------------------------------------------------------------


@torch.no_grad()
def _change_all(model: nn.Module) -> None:
    """Change all parameters, because the last layer of a ViT starts with zeros."""
    for parameter in model.parameters():
        parameter += 0.02 * torch.randn_like(parameter)


@pytest.mark.parametrize(("name", "side"), MODELS)
def test_layers_one_by_one_compute_what_the_model_computes(name: str, side: int) -> None:
    model, images = built(name, side), torch.randn(2, 3, side, side)
    with torch.no_grad():
        if name == "transformer":
            _change_all(model)
        expected = model.eval()(images)
        x = images
        for layer in layers_of(model):
            x = layer(x)
    assert float(expected.std()) > 0
    assert torch.equal(x, expected)


def test_the_flops_of_the_layers_add_up_and_nothing_changes() -> None:
    model = built("resnet18", 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flops = layer_flops(layers_of(model), quick(model="resnet18", image_size=16))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.eval()(torch.zeros(1, 3, 16, 16))
    assert sum(flops) == counter.get_total_flops()
    assert min(flops) > 0


# --- heads ---------------------------------------------------------------------------------------


def test_split_heads_compute_what_attention_computed() -> None:
    model: Any = built("transformer", 16)
    _change_all(model)
    images, size = torch.randn(2, 3, 16, 16), size_of(model)
    expected = model(images)
    expected.square().sum().backward()
    gradient = model.encoder.layers[0].self_attention.in_proj_weight.grad
    model.zero_grad()
    split_heads(model)
    found = model(images)
    found.square().sum().backward()
    assert torch.allclose(found, expected, atol=1e-5)
    first = model.encoder.layers[0].self_attention
    parts = [layer.weight.grad for layer in (first.query, first.key, first.value)]
    assert torch.allclose(torch.cat(parts), gradient, rtol=1e-3, atol=1e-4)
    assert size_of(model) == size
