"""What the pictures and the quoted numbers of phase3_multi_node/guidelines.md show.

A torch.distributed program like any other: it says ``init_process_group`` and runs one subject.

    distlab sim --cluster laptop --ranks 8 --plot tree.png scripts/phase3.py tree_all_reduce
    torchrun --nproc-per-node 4 scripts/phase3.py tree_all_reduce
"""

import sys

import torch
import torch.distributed as dist

from solutions.phase3_multi_node import tree_allreduce

SMALL_ELEMENTS = 65_994  # the CNN of `make demo`: 264 kB of gradients
LARGE_ELEMENTS = 25_557_032  # a ResNet-50: 102 MB


def main() -> None:
    """Run the subject named on the command line."""
    dist.init_process_group()
    SUBJECTS[sys.argv[1]]()
    dist.destroy_process_group()


# tree_allreduce


def tree_all_reduce() -> None:
    """Sum the CNN's gradients along a tree."""
    tree_allreduce.tree_all_reduce(torch.ones(SMALL_ELEMENTS))


def double_tree_in_segments() -> None:
    """Sum the CNN's gradients along two trees, each half in four segments."""
    x = torch.ones(SMALL_ELEMENTS)
    tree_allreduce.double_binary_tree_all_reduce(x, segment_bytes=x.nbytes // 8 + 4)


def double_tree_large() -> None:
    """Sum a ResNet-50's gradients along two trees."""
    x = torch.empty(LARGE_ELEMENTS, device="meta")
    tree_allreduce.double_binary_tree_all_reduce(x)


SUBJECTS = {
    subject.__name__: subject
    for subject in (tree_all_reduce, double_tree_in_segments, double_tree_large)
}

if __name__ == "__main__":
    main()
