"""Compare your split MLP and attention with parallelize_module.

distlab sim --ranks 4 examples/in_pytorch/tensor_parallel.py
torchrun --nproc-per-node 2 examples/in_pytorch/tensor_parallel.py
"""

import copy
from typing import Any

import lesson
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from phase2_advanced.given import MLP, Attention

FIRST = ("query", "key", "value")
PLANS: dict[str, dict[str, Any]] = {
    "mlp": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "attention": {**dict.fromkeys(FIRST, ColwiseParallel()), "out": RowwiseParallel()},
}


def main() -> None:
    """Split each module in both ways, and compare outputs and gradients."""
    dist.init_process_group()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    course = lesson.load("tensor_parallel", "2.15")
    torch.manual_seed(0)
    for name, ours in (("mlp", MLP(16)), ("attention", Attention(16, heads=4))):
        theirs = parallelize_module(copy.deepcopy(ours), mesh["tp"], PLANS[name])
        getattr(course, f"parallelize_{name}")(ours)
        x = torch.randn(2, 8, 16, requires_grad=True)
        z = x.detach().clone().requires_grad_()
        y, y_theirs = ours(x), theirs(z)
        y.square().sum().backward()
        y_theirs.square().sum().backward()
        assert x.grad is not None
        assert z.grad is not None
        lesson.compare(f"{name}, output", [y], [y_theirs])
        lesson.compare(f"{name}, gradient of the input", [x.grad], [z.grad])
        slices = [gradient.to_local() for gradient in lesson.gradients(theirs)]  # of DTensors
        lesson.compare(f"{name}, gradients of the slices", lesson.gradients(ours), slices)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
