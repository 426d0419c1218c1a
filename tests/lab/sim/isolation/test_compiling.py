"""On simulated ranks, torch.compile runs what it gets as it is, and says so once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distlab.sim import Options, simulate


def double(x: Tensor) -> Tensor:
    return 2 * x


def in_place(model: nn.Module) -> nn.Module:
    model.compile(dynamic=True)
    return model


@pytest.mark.parametrize(
    "compiled",
    [
        lambda model: torch.compile(model),
        lambda model: torch.compile(model, fullgraph=True, mode="max-autotune"),
        lambda model: torch.compile(model, disable=True),
        in_place,
    ],
)
@pytest.mark.parametrize("semantics", ["gloo", "nccl"])
@pytest.mark.filterwarnings("ignore:torch.compile", "ignore::DeprecationWarning")
def test_a_compiled_module_computes_what_it_does_otherwise(
    compiled: Callable[[Any], Any], semantics: str
) -> None:
    def main() -> bool:
        plain = nn.Linear(4, 4, device="cuda" if semantics == "nccl" else "cpu")
        x = torch.ones(2, 4, device=plain.weight.device)
        return torch.equal(plain(x), compiled(plain)(x))

    options = Options(semantics=semantics)
    assert simulate(main, 1, cluster="dgx-h100", options=options).results == [True]


@pytest.mark.filterwarnings("ignore:torch.compile", "ignore::DeprecationWarning")
def test_a_compiled_module_has_the_state_of_torchs_wrapper() -> None:
    def main() -> list[str]:
        model: Any = torch.compile(nn.Linear(4, 4))
        model.eval()
        assert not model._orig_mod.training
        return [*model.state_dict()]

    assert simulate(main, 1).results == [["_orig_mod.weight", "_orig_mod.bias"]]


def test_a_world_says_once_that_nothing_is_compiled_and_restores_torchs_function() -> None:
    def main() -> list[float]:
        functions = [torch.compile(double), torch.compile(fullgraph=True)(double)]
        return [function(torch.ones(1)).item() for function in functions]

    before = torch.compile
    with pytest.warns(UserWarning, match=r"torch\.compile: simulated ranks run this") as warned:
        simulated = simulate(main, 2)
    assert simulated.results == [[2.0, 2.0], [2.0, 2.0]]
    assert [str(warning.message)[:13] for warning in warned] == ["torch.compile"]
    assert warned[0].filename == __file__
    assert torch.compile is before


class WithPlaces(nn.Module):
    """Adds a buffer that is a view."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.ones(4, 2).unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.places


@pytest.mark.parametrize("semantics", ["gloo", "nccl"])
def test_modules_can_be_exported(semantics: Any) -> None:
    def exports() -> float:
        exported = torch.export.export(WithPlaces(), (torch.ones(1, 4, 2),))
        return exported.module()(torch.ones(1, 4, 2)).sum().item()

    options = Options(semantics=semantics)
    assert simulate(exports, 2, cluster="dgx-h100", options=options).results == [16.0, 16.0]
