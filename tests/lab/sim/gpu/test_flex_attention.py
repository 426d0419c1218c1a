"""``flex_attention`` on simulated GPUs, which runs as the operations that it stands for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from distlab.sim import Options, simulate


def run(main: Callable[[], Any]) -> Any:
    ran = simulate(main, 1, cluster="dgx-h100", options=Options(semantics="nccl"))
    assert ran.gpu_time is not None
    assert ran.gpu_time.wrong == []
    return ran.results[0]


def query(**settings: Any) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 4, 128, 16, device="cuda", **settings)


def is_causal(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return row >= column


def nearby(score: Tensor, _b: Tensor, _h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return score - torch.ones((), device=score.device) * (row - column).abs()


def biased(q: Tensor) -> Tensor:
    places = torch.arange(q.size(2), device=q.device)
    bias = -(places[:, None] - places).abs().to(q.dtype)
    return scaled_dot_product_attention(q, q, q, bias)


def test_masks_and_scores_have_the_values_and_gradients_of_plain_attention() -> None:
    def main() -> list[tuple[Tensor, Tensor]]:
        mask = create_block_mask(is_causal, None, None, 128, 128, device="cuda")
        pairs: list[tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = [
            (
                lambda q: flex_attention(q, q, q, block_mask=mask),
                lambda q: scaled_dot_product_attention(q, q, q, is_causal=True),
            ),
            (lambda q: flex_attention(q, q, q, score_mod=nearby), biased),
        ]
        return [(with_gradient(one), with_gradient(other)) for one, other in pairs]

    def with_gradient(attend: Callable[[Tensor], Any]) -> Tensor:
        q = query(requires_grad=True)
        out = attend(q)
        out.square().sum().backward()
        assert out.is_cuda
        assert q.grad is not None
        return torch.stack([out.detach(), q.grad]).cpu()

    for flexible, plain in run(main):
        assert torch.allclose(flexible, plain, atol=1e-5)


@pytest.mark.parametrize(("device", "expected"), [("cuda", torch.bfloat16), ("cpu", torch.float32)])
def test_autocast_applies_on_its_device_alone(device: str, expected: torch.dtype) -> None:
    def main() -> torch.dtype:
        q = query().to(device)
        with torch.autocast("cuda", torch.bfloat16):
            out: Any = flex_attention(q, q, q)
        dtype: torch.dtype = out.dtype
        return dtype

    assert run(main) is expected


def test_a_device_is_shown_inside_vmap() -> None:
    def main() -> Any:
        x = torch.arange(3.0, device="cuda")
        y = torch.func.vmap(lambda v: v + torch.ones((), device=v.device))(x)
        return y.device.type, y.tolist()

    assert run(main) == ("cuda", [1.0, 2.0, 3.0])
