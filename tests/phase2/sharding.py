"""What bodies and judges of tensor parallelism share: full modules, inputs, and their parts."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phase2_advanced.given import MLP, Attention, Block

PARTS = {  # by the end of a parameter's name: the dim that is split over the ranks
    "query.weight": 0,
    "query.bias": 0,
    "key.weight": 0,
    "key.bias": 0,
    "value.weight": 0,
    "value.bias": 0,
    "up.weight": 0,
    "up.bias": 0,
    "out.weight": 1,
    "down.weight": 1,
}


def drawn(*shape: int, seed: int) -> Tensor:
    """Numbers from -1 to 1 in float64, the same wherever they are drawn."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1


def laid_out(x: Tensor, is_transposed: bool) -> Tensor:
    """Return the same numbers, in memory that is not contiguous if ``is_transposed``."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if is_transposed else x


def is_alone_summed(x: Tensor, gradient: Tensor) -> bool:
    """Whether what another reader of ``x`` sends back arrives as it is; x.grad stays as it was."""
    before, x.grad = x.grad, None
    go_backward_with(x, gradient)
    found, x.grad = x.grad, before
    return torch.equal(found, gradient) if found is not None else False


class _End(torch.autograd.Function):
    """The end of a graph; its backward pass hands on a gradient, the very tensor."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def go_backward_with(y: Tensor, gradient: Tensor) -> None:
    """Do what ``y.backward(gradient)`` does, which would load SymPy."""
    _End.apply(y, gradient).backward()  # type: ignore[no-untyped-call]


def go_backward(output: Tensor, weights: Tensor) -> None:
    """Go backward from sum(output · weights), where that is possible.

    An output without a graph, or of another shape, is left for the judge, who knows what is wrong.
    """
    if output.requires_grad and output.shape == weights.shape:
        (output * weights).sum().backward()


def with_drawn_parameters(module: nn.Module, without_bias: bool = False) -> Any:
    """Give a module parameters in float64 that do not depend on torch's generator."""
    for layer in module.modules():
        if without_bias and isinstance(layer, nn.Linear):
            layer.bias = None
    module.double()
    for seed, parameter in enumerate(module.parameters(), start=1):
        parameter.data = drawn(*parameter.shape, seed=seed)
    return module


def linear(in_features: int, out_features: int, has_bias: bool) -> nn.Linear:
    """Build a full layer."""
    layer: nn.Linear = with_drawn_parameters(nn.Linear(in_features, out_features, bias=has_bias))
    return layer


def model_of(kind: str, width: int, heads: int, without_bias: bool = False) -> nn.Module:
    """Build a full MLP, attention or block."""
    built = {
        "mlp": lambda: MLP(width),
        "attention": lambda: Attention(width, heads),
        "block": lambda: Block(width, heads),
    }[kind]()
    model: nn.Module = with_drawn_parameters(built, without_bias)
    return model


def own(full: Tensor, rank: int, n: int, dim: int | None) -> Tensor:
    """The rank's part of a dim; None: all of it."""
    return full if dim is None else full.chunk(n, dim)[rank]


def part_of(name: str) -> int | None:
    """The dim of a parameter that is split; None: every rank holds it whole."""
    return next((dim for end, dim in PARTS.items() if name.endswith(end)), None)


def wrong_shapes(
    made: nn.Module,
    full: nn.Module,
    place: tuple[int, int],
    parts: Mapping[str, int | None] | None = None,
) -> str:
    """Say which parameters have not the shape of the rank's part; "" if all have.

    Args:
        made: from ``full``.
        full: the full module.
        place: rank and number of ranks.
        parts: the dim that is split, by name; by default as in a transformer's block.
    """
    expected = {
        name: [*own(p, *place, parts[name] if parts else part_of(name)).shape]
        for name, p in full.named_parameters()
    }
    shapes = {name: [*p.shape] for name, p in made.named_parameters()}
    wrong = [
        f"{name} has the shape {shape}, and should have {expected[name]}"
        for name, shape in shapes.items()
        if shape != expected.get(name, shape)
    ]
    return f": {', '.join(wrong)}" if wrong else ""


def group_argument(group: Any) -> dict[str, Any]:
    """``group=``, left out where all ranks are meant."""
    return {} if group is None else {"group": group}


def place(group: Any) -> tuple[int, int]:
    """Rank and number of ranks."""
    return dist.get_rank(group), dist.get_world_size(group)


def listed(tensor: Any) -> Any:
    """A tensor as lists; anything else as it is."""
    return tensor.detach().tolist() if isinstance(tensor, Tensor) else tensor


def state_of(module: nn.Module) -> dict[str, Any]:
    """Values, gradients, dtypes and memory of the parameters, by name."""
    return {name: _about(p) for name, p in module.named_parameters()}


def _about(parameter: nn.Parameter) -> dict[str, Any]:
    return {
        "values": listed(parameter),
        "gradient": listed(parameter.grad),
        "is_trained": parameter.requires_grad,
        "dtype": str(parameter.dtype),
        "num_bytes": parameter.nbytes,
        "held_bytes": parameter.untyped_storage().nbytes(),
    }


def passed(full: nn.Module, x: Tensor, weights: Tensor) -> Mapping[str, Any]:
    """What a full module makes of an input: output, and gradients of sum(output · weights)."""
    output = full(x)
    (output * weights).sum().backward()
    return {
        "output": output.detach(),
        "input": x.grad,
        "values": {name: p.detach() for name, p in full.named_parameters()},
        "gradients": {name: p.grad for name, p in full.named_parameters()},
    }
