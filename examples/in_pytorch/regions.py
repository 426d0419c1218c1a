"""Compare the four operators around a region with changes of a DTensor's placement.

distlab sim --ranks 4 examples/in_pytorch/regions.py
torchrun --nproc-per-node 2 examples/in_pytorch/regions.py
"""

import lesson
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

OPERATORS = {  # placements of the tensor before and after, and of the gradient that comes back
    "copy_to_tensor_region": (Replicate(), Replicate(), Partial()),
    "reduce_from_tensor_region": (Partial(), Replicate(), Replicate()),
    "gather_from_sequence_region": (Shard(1), Replicate(), Partial()),
    "reduce_scatter_to_sequence_region": (Partial(), Shard(1), Shard(1)),
}


def drawn(shape: torch.Size, placement: Placement) -> Tensor:
    """Draw a tensor, the same on all ranks if it is Replicate."""
    torch.manual_seed(0 if placement.is_replicate() else 1 + dist.get_rank())
    return torch.randn(shape)


def main() -> None:
    """Send a tensor forward, and another one backward, through each operator."""
    dist.init_process_group()
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    course = lesson.load("tensor_parallel", "2.12", "2.17")
    for name, (before, after, of_gradient) in OPERATORS.items():
        x = drawn(torch.Size([2, 4 * size, 3]), before).requires_grad_()
        z = x.detach().clone().requires_grad_()
        ours = getattr(course, name)(x)
        moved = DTensor.from_local(z, mesh, [before]).redistribute(placements=[after])
        theirs = moved.to_local(grad_placements=[of_gradient])
        gradient = drawn(ours.shape, of_gradient)
        ours.backward(gradient)
        theirs.backward(gradient)
        assert x.grad is not None
        assert z.grad is not None
        lesson.compare(f"{name}, forward", [ours], [theirs])
        lesson.compare(f"{name}, backward", [x.grad], [z.grad])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
