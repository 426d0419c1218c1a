"""Models in blocks, micro-batches of uneven sizes, and what one process computes with them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phase2_advanced.given import Batch, LossSum, cross_entropy_sum

WIDTH, CLASSES, LENGTH = 12, 3, 2
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
KINDS = ("dense", "tokens", "frozen", "checkpointed", "detached")


class _Again(torch.autograd.Function):
    """Computes a layer, and in the backward pass again; that starts a backward pass inside."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        if not torch.autograd._is_checkpoint_valid():  # torch's own checkpoint refuses it too
            raise RuntimeError("checkpointed layers need backward(), not torch.autograd.grad()")
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            (ctx.layer(x) * gradient).sum().backward()  # backward(gradient) would import SymPy
        return None, x.grad


class Checkpointed(nn.Module):
    """A layer that keeps only its input for the backward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return _Again.apply(self.layer, x)


class Detached(nn.Module):
    """Cuts the graph: what comes before it requires a gradient, and gets none."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Across(nn.Module):
    """Lays its input out across: it is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT.contiguous().mT


def block(number: int, num_blocks: int, kind: str = "dense") -> nn.Module:
    """One block of a model, with the same weights wherever it is built."""
    torch.manual_seed(10 + number)
    is_last = number == num_blocks - 1
    linear = nn.Linear(WIDTH, CLASSES if is_last else WIDTH, **DOUBLE)
    layer: nn.Module = linear if is_last else nn.Sequential(linear, nn.Tanh())
    if kind == "frozen":
        linear.bias.requires_grad_(False)
        linear.weight.requires_grad_(is_last)
    if number == 0 and kind in ("tokens", "frozen"):
        embedding = nn.Embedding(7, WIDTH, **DOUBLE)
        embedding.weight.requires_grad_(kind == "tokens")
        return nn.Sequential(embedding, layer, Across())
    if is_last and kind == "detached":
        return nn.Sequential(Detached(), layer)
    return Checkpointed(layer) if number and kind == "checkpointed" else layer


def micro_batch(number: int, rows: int, kind: str = "dense") -> Batch:
    """Inputs, and two tensors for the loss; some targets do not count."""
    generator = torch.Generator().manual_seed(number)
    targets = torch.randint(CLASSES, (rows, LENGTH), generator=generator)
    targets[torch.rand(rows, LENGTH, generator=generator) < 0.3] = -100
    targets[0, 0] = 1
    weights = torch.rand(rows, **DOUBLE, generator=generator)
    if kind in ("tokens", "frozen"):
        return torch.randint(7, (rows, LENGTH), generator=generator), targets, weights
    inputs = torch.randn(rows, LENGTH, WIDTH, generator=generator, **DOUBLE)
    return inputs, targets, weights


def weighted_sum(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """A loss that uses all three tensors of a batch, and counts targets in its own way."""
    inputs, targets, weights = batch
    errors = (model(inputs) - targets[..., None]).square().sum(dim=(1, 2))
    return (errors * weights).sum(), 3 * len(weights)


def loss_of(kind: str) -> LossSum:
    return cross_entropy_sum if kind == "tokens" else weighted_sum


def gradients_of(module: nn.Module) -> dict[str, list[float] | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.flatten().tolist()
        for name, parameter in module.named_parameters()
    }


def alone(num_blocks: int, sizes: Sequence[int], kind: str) -> dict[str, Any]:
    """Loss, number of targets, and gradients by block, of one process with all micro-batches."""
    blocks = [block(number, num_blocks, kind) for number in range(num_blocks)]
    model, batches = nn.Sequential(*blocks), [micro_batch(*one, kind) for one in enumerate(sizes)]
    found = [loss_of(kind)(model, batch) for batch in batches]
    total, count = torch.stack([loss for loss, _ in found]).sum(), sum(n for _, n in found)
    means = torch.stack([loss / n for loss, n in found])
    return {
        "loss": float(total.detach()) / count,
        "mean of means": float(means.detach().mean()),
        "last": float(means[-1].detach()),
        "targets": count,
        "gradients": _gradients_by_block(blocks, total / count),
        "gradients of means": _gradients_by_block(blocks, means.mean()),
    }


def _gradients_by_block(blocks: Sequence[nn.Module], loss: Tensor) -> list[dict[str, Any]]:
    for one in blocks:
        one.zero_grad()
    torch.autograd.backward(loss, retain_graph=True)
    return [gradients_of(one) for one in blocks]
