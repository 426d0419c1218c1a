"""Compare your FullyShardedDataParallel with torch's fully_shard, as ZeRO 3 and as ZeRO 2.

distlab sim --ranks 4 examples/in_pytorch/fully_shard.py
torchrun --nproc-per-node 2 examples/in_pytorch/fully_shard.py
"""

from copy import deepcopy

import lesson
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def held(model: nn.Module) -> int:
    """Return how many numbers this rank holds of the parameters that the model has now."""
    params = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(param.numel() for param in params)


def step(name: str, model: nn.Module) -> None:
    """Run both passes on a batch of this rank's own, and update the shards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    loss = model(torch.randn(4, 16)).square().mean()
    after_forward = held(model)
    loss.backward()
    optimizer.step()
    lesson.say(f"{name}: {after_forward} numbers after forward, {held(model)} after backward")


def main() -> None:
    """Train four layers for one step in each way; compare the parameters."""
    dist.init_process_group()
    course = lesson.load("zero", "3.14")
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    mine = course.FullyShardedDataParallel(deepcopy(layers), compute_dtype=torch.float32)
    step("yours", mine)
    state: dict[str, Tensor] = mine.full_state_dict()
    for reshard in (True, False):
        theirs = deepcopy(layers)
        for layer in theirs:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(theirs)  # begins each backward pass, and waits for the last gradients
        step(f"reshard_after_forward={reshard}", theirs)
        whole = {name: p.full_tensor() for name, p in theirs.state_dict().items()}
        lesson.compare("parameters", state.values(), [whole[name] for name in state])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
