"""Each rank makes only the group that it belongs to.

Retold from pytorch/pytorch#130102. On gloo, each run ends in another way: wrong sums such as 101
and 1010, `Connection reset by peer`, or a hang.

distlab sim --ranks 4 examples/museum/groups_by_members.py
torchrun --nproc-per-node 4 examples/museum/groups_by_members.py
"""

import torch
import torch.distributed as dist


def main() -> None:
    """Sum over pairs of ranks: 0 with 3, and 1 with 2."""
    dist.init_process_group()
    rank = dist.get_rank()
    mine = [0, 3] if rank in (0, 3) else [1, 2]
    group = dist.new_group(mine)
    total = torch.tensor([10.0**rank])
    dist.all_reduce(total, group=group)
    print(f"rank {rank}: the sum over {mine} is {total.item():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
