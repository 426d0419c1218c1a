"""Compare your block, split by weights and positions, with SequenceParallel.

distlab sim --ranks 4 examples/in_pytorch/sequence_parallel.py
torchrun --nproc-per-node 2 examples/in_pytorch/sequence_parallel.py
"""

import copy
from typing import Any

import lesson
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from phase2_advanced.given import Block

FIRST = ("attention.query", "attention.key", "attention.value", "mlp.up")
GATHER = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
SCATTER = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
PLAN: dict[str, Any] = {
    **dict.fromkeys(("attention_norm", "mlp_norm"), SequenceParallel()),
    **dict.fromkeys(("attention", "mlp"), GATHER),
    **dict.fromkeys(FIRST, ColwiseParallel()),
    **dict.fromkeys(("attention.out", "mlp.down"), SCATTER),
}


def main() -> None:
    """Split a block in both ways, and compare outputs and gradients."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    course = lesson.load("tensor_parallel", "2.17")
    torch.manual_seed(0)
    ours = Block(16, heads=4)
    theirs = parallelize_module(copy.deepcopy(ours), mesh["tp"], PLAN)
    course.parallelize_block(ours)
    x = torch.randn(2, 8, 16).chunk(size, dim=1)[rank].clone().requires_grad_()
    z = x.detach().clone().requires_grad_()
    y, y_theirs = ours(x), theirs(DTensor.from_local(z, mesh, [Shard(1)])).to_local()
    y.square().sum().backward()
    y_theirs.square().sum().backward()
    lesson.compare("output", [y], [y_theirs])
    of_norm = theirs.get_parameter("mlp_norm.weight").grad
    expected = ours.get_parameter("mlp_norm.weight").grad
    assert isinstance(of_norm, DTensor)
    assert expected is not None
    lesson.compare("gradient of a norm, on one rank", [expected], [of_norm.to_local()])
    lesson.compare("gradient of a norm, full_tensor", [expected], [of_norm.full_tensor()])
    for model in (ours, theirs):
        torch.optim.SGD(model.parameters(), lr=0.01).step()
    stepped = [p.to_local() for p in theirs.parameters() if isinstance(p, DTensor)]
    lesson.compare("parameters after a step", ours.parameters(), stepped)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
