"""Compare your shard_indices with DistributedSampler.

distlab sim --ranks 4 examples/in_pytorch/sampler.py
torchrun --nproc-per-node 2 examples/in_pytorch/sampler.py
"""

from typing import Any

import lesson
import torch.distributed as dist
from torch.utils.data import DistributedSampler

SAMPLES: Any = range(10)


def theirs(seed: int, epoch: int) -> list[int]:
    """Return the shuffled shard that DistributedSampler gives this rank."""
    sampler: Any = DistributedSampler(SAMPLES, seed=seed)
    sampler.set_epoch(epoch)
    return [*sampler]


def main() -> None:
    """Share ten samples, in order and shuffled."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    shard_indices = lesson.load("data_loader", "1.1").shard_indices
    for drop_last in (False, True):
        sampler: Any = DistributedSampler(SAMPLES, shuffle=False, drop_last=drop_last)
        mine = shard_indices(len(SAMPLES), rank, size, shuffle=False, drop_last=drop_last)
        lesson.say(f"drop_last={drop_last}: yours {mine}, torch's {[*sampler]}")

    def ours(seed: int, epoch: int) -> list[int]:
        shard: list[int] = shard_indices(len(SAMPLES), rank, size, seed=seed, epoch=epoch)
        return shard

    for name, shard in (("yours", ours), ("torch's", theirs)):
        is_same = shard(1, 0) == shard(0, 1)
        lesson.say(f"{name}: seed 1 in epoch 0 {'is' if is_same else 'is not'} seed 0 in epoch 1")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
