"""Hand-written ZeRO: model states are copied to every rank, or sharded in one of three stages.

    stage 0  every rank holds everything
    stage 1  optimizer state in shards                             P_os
    stage 2  gradients in shards too                               P_os+g
    stage 3  parameters in shards too, gathered for each use       P_os+g+p

The model, on meta, has 7.5 billion parameters in three square matrices. Weights and gradients are
in bfloat16, and the optimizer keeps the weights and two averages in float32, which makes
2 + 2 + 12 bytes per parameter.

Source: Rajbhandari et al. 2020 (ZeRO), section 5.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear, pad

from distlab.sim.device.memory import this_tracker

LAYERS, WIDTH = 3, 50_000
PARAMETERS = LAYERS * WIDTH**2

Bytes = dict[str, int]


class MixedPrecisionAdam(torch.optim.Optimizer):
    """Adam on float32 copies of the parameters."""

    def __init__(self, parameters: list[nn.Parameter], lr: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter from its gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group["lr"])

    def _update(self, parameter: Tensor, lr: float) -> None:
        state, grad = self.state[parameter], parameter.grad.float()
        if not state:
            state["master"] = parameter.float()
            state["average"], state["square"] = torch.zeros_like(grad), torch.zeros_like(grad)
        state["average"].lerp_(grad, 0.1)
        state["square"].lerp_(grad.square_(), 0.05)
        torch.sqrt(state["square"], out=grad)
        state["master"].addcdiv_(state["average"], grad.add_(1e-8), value=-lr)
        parameter.copy_(state["master"])


class ShardedLinear(Function):
    """A linear layer with a sharded weight, which is gathered for one product at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor) -> Tensor:
        ctx.save_for_backward(x, shard)
        return linear(x, matrix(gathered(shard)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, shard = ctx.saved_tensors
        grad_x = grad @ matrix(gathered(shard))
        return grad_x, scattered((grad.t() @ x).view(-1))


def matrix(flat: Tensor) -> Tensor:
    """Return the weight matrix in a flat tensor, without the padding at its end."""
    return (flat if flat.numel() == WIDTH**2 else flat[: WIDTH**2]).view(WIDTH, WIDTH)


def gathered(shard: Tensor) -> Tensor:
    """Return the whole tensor, gathered from the shards of all ranks."""
    whole = shard.new_empty(dist.get_world_size() * shard.numel())
    dist.all_gather_into_tensor(whole, shard.detach())
    return whole


def scattered(grad: Tensor) -> Tensor:
    """Return this rank's shard of the sum over all ranks."""
    shard = grad.new_empty(shard_size())
    missing = shard.numel() * dist.get_world_size() - grad.numel()
    dist.reduce_scatter_tensor(shard, pad(grad, (0, missing)) if missing else grad)
    return shard


def shard_size() -> int:
    """Return how many of a layer's elements a rank holds, rounded up so that all hold the same."""
    return -(-(WIDTH**2) // dist.get_world_size())


def my_shard(whole: Tensor) -> Tensor:
    """Return a view of this rank's shard."""
    return whole.detach().view(-1, shard_size())[dist.get_rank()]


def reduce_gradient(stage: int, shard: nn.Parameter, whole: Tensor) -> None:
    """Sum a gradient over all ranks as soon as it is ready; in stage 2, keep only a shard."""
    if stage == 2:
        shard.grad, whole.grad = scattered(whole.grad), None
        return
    dist.all_reduce(whole.grad)
    if stage == 1:
        shard.grad = my_shard(whole.grad)


def model_states(stage: int) -> tuple[Bytes, Bytes]:
    """Train for two steps; return the bytes that this rank holds after them, and at the peak.

    The peak is in the second step, when optimizer state already takes up memory.
    """
    size = shard_size() * (1 if stage == 3 else dist.get_world_size())
    with torch.device("meta"):
        layers = [nn.Parameter(torch.empty(size, dtype=torch.bfloat16)) for _ in range(LAYERS)]
        owned = [nn.Parameter(my_shard(p)) for p in layers] if stage in (1, 2) else layers
        optimizer = MixedPrecisionAdam(owned)
        if stage < 3:
            for whole, shard in zip(layers, owned, strict=True):
                whole.register_post_accumulate_grad_hook(partial(reduce_gradient, stage, shard))
        for _ in range(2):
            for parameter in (*layers, *owned):
                parameter.grad = None
            train_step(stage, layers, owned, optimizer)
    tracker = this_tracker()
    assert tracker is not None
    return tracker.live_by_category, tracker.peak_by_category


def train_step(
    stage: int,
    layers: list[nn.Parameter],
    owned: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Train on one token, so that activations are negligible next to the model."""
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
    for layer in layers:
        x = ShardedLinear.apply(x, layer) if stage == 3 else linear(x, matrix(layer))
    x.sum().backward()
    optimizer.step()
    if stage in (1, 2):
        for whole, shard in zip(layers, owned, strict=True):
            dist.all_gather_into_tensor(whole.detach(), shard.detach())
