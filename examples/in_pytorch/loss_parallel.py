"""Compare your split embedding and loss with RowwiseParallel and loss_parallel.

distlab sim --ranks 4 examples/in_pytorch/loss_parallel.py
torchrun --nproc-per-node 2 examples/in_pytorch/loss_parallel.py
"""

from typing import Any

import lesson
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy


def main() -> None:
    """Look up tokens of a vocabulary of 32; then take the loss of logits that are split by it."""
    dist.init_process_group()
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    course = lesson.load("tensor_parallel", "2.16")
    torch.manual_seed(0)
    full, tokens = nn.Embedding(32, 8), torch.randint(32, (6,))
    ours = course.VocabParallelEmbedding(full)
    theirs = parallelize_module(full, mesh, RowwiseParallel(input_layouts=Replicate()))
    lesson.compare("embedding", [ours(tokens)], [theirs(tokens)])

    logits, targets = torch.randn(6, 32), torch.randint(32, (6,))
    mine = logits.chunk(size, dim=1)[dist.get_rank()].clone().requires_grad_()
    also_mine = mine.detach().clone().requires_grad_()
    loss = course.vocab_parallel_cross_entropy(mine, targets)
    loss.mean().backward()
    with loss_parallel():
        split = DTensor.from_local(also_mine, mesh, [Shard(1)])
        mean: Any = cross_entropy(split, targets)
        mean.backward()
    assert mine.grad is not None
    assert also_mine.grad is not None
    lesson.compare("mean loss", [loss.mean()], [mean.full_tensor()])
    lesson.compare("gradients of the logits", [mine.grad], [also_mine.grad])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
