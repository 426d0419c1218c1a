"""What the pictures and the quoted numbers of phase3_multi_node/guidelines.md show.

A torch.distributed program like any other: it says ``init_process_group`` and runs one subject.

    distlab sim --ranks 8 --plot ring.png scripts/phase3.py flat_ring
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from phase3_multi_node.given import node_groups
from solutions.phase3_multi_node import ring_allreduce, topology


def main() -> None:
    """Run the subject named on the command line."""
    dist.init_process_group()
    SUBJECTS[sys.argv[1]]()
    dist.destroy_process_group()


# topology


def hierarchical_all_reduce() -> None:
    """Sum 4 MB on nodes of 4 ranks, with rings inside the nodes and across them."""
    inside, across = node_groups([f"node{rank // 4}" for rank in range(dist.get_world_size())])
    topology.hierarchical_all_reduce(
        torch.ones(10**6),
        inside,
        across,
        reduce_scatter=ring_allreduce.ring_reduce_scatter,
        all_reduce=ring_allreduce.ring_all_reduce,
        all_gather=ring_allreduce.ring_all_gather,
    )


def flat_ring() -> None:
    """Sum 4 MB around all ranks."""
    ring_allreduce.ring_all_reduce(torch.ones(10**6))


SUBJECTS: dict[str, Callable[[], None]] = {
    # topology
    "hierarchical_all_reduce": hierarchical_all_reduce,
    "flat_ring": flat_ring,
}

if __name__ == "__main__":
    main()
