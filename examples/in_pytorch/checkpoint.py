"""Compare your checkpoints with torch's, which may also be selective.

distlab sim --ranks 1 examples/in_pytorch/checkpoint.py
torchrun --nproc-per-node 1 examples/in_pytorch/checkpoint.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lesson
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

PRODUCT = torch.ops.aten.addmm.default


class Products(TorchDispatchMode):
    """Counts the forward products of linear layers."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is PRODUCT
        return func(*args, **(kwargs or {}))


def main() -> None:
    """Run three linear layers, and count how often a product is computed."""
    dist.init_process_group()
    course = lesson.load("activation_checkpointing", "2.5", "2.6")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    keep = partial(create_selective_checkpoint_contexts, [PRODUCT])
    ways: dict[str, Callable[[], Tensor]] = {
        "no checkpoint": lambda: layers(x),
        "yours": lambda: course.checkpoint(layers, x),
        "torch's": lambda: checkpoint(layers, x, use_reentrant=False),
        "torch's, selective": lambda: checkpoint(layers, x, use_reentrant=False, context_fn=keep),
        "yours, 2 segments": lambda: course.checkpoint_sequential([*layers], 2, x),
        "torch's, 2 segments": lambda: checkpoint_sequential(layers, 2, x, use_reentrant=False),
    }
    layers(x).sum().backward()
    expected = [gradient.clone() for gradient in lesson.gradients(layers)]
    for name, way in ways.items():
        layers.zero_grad()
        with Products() as products:
            way().sum().backward()
        lesson.compare(f"{name}, {products.count} products", expected, lesson.gradients(layers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
