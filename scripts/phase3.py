"""What the pictures and the quoted numbers of phase3_multi_node/guidelines.md show.

A torch.distributed program like any other: it says ``init_process_group`` and runs one subject.

    distlab sim --ranks 4 --plot staleness.png scripts/phase3.py bounded_staleness
"""

import sys
import time

import torch
import torch.distributed as dist

from solutions.phase3_multi_node import parameter_server


def main() -> None:
    """Run the subject named on the command line."""
    dist.init_process_group()
    SUBJECTS[sys.argv[1]]()
    dist.destroy_process_group()


# parameter_server


def bounded_staleness() -> None:
    """Rank 0 serves with a staleness of 2; the last worker is four times slower than the others."""
    rank, workers = dist.get_rank(), [*range(1, dist.get_world_size())]
    shard, num_steps = torch.zeros(1_000_000), 6
    if rank == 0:
        optimizer = torch.optim.SGD([shard], lr=0.1)
        parameter_server.serve_with_bounded_staleness(shard, optimizer, workers, num_steps, 2)
        return
    gradient = torch.ones_like(shard)
    for _ in range(num_steps):
        time.sleep(40e-3 if rank == workers[-1] else 10e-3)
        parameter_server.push_pull({0: gradient}, {0: shard})


SUBJECTS = {
    # parameter_server
    "bounded_staleness": bounded_staleness,
}

if __name__ == "__main__":
    main()
