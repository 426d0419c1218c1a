"""What the pictures and the quoted numbers of phase2_advanced/guidelines.md show.

A torch.distributed program like any other: it says ``init_process_group`` and runs one subject.

    distlab sim --ranks 4 --plot gpipe.png scripts/phase2.py gpipe
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from phase2_advanced.given import Block
from solutions.phase2_advanced import tensor_parallel


def main() -> None:
    """Run the subject named on the command line."""
    dist.init_process_group()
    SUBJECTS[sys.argv[1]]()
    dist.destroy_process_group()


# gradient_accumulation

# mixed_precision

# activation_checkpointing

# model_parallel

# pipeline_parallel

# tensor_parallel


def tensor_block() -> None:
    """Split a block's weights; forward and backward on 2,048 positions of width 4,096."""
    block, x = large_block(2048)
    tensor_parallel.parallelize_attention(block.attention)
    tensor_parallel.parallelize_mlp(block.mlp)
    block(x).sum().backward()


def sequence_block() -> None:
    """Split the positions between its layers, too."""
    block, x = large_block(2048 // dist.get_world_size())
    tensor_parallel.parallelize_block(block)
    block(x).sum().backward()


def large_block(positions: int) -> tuple[Block, torch.Tensor]:
    """Make a block with 32 heads, and an input, in 16 bits; on meta, where nothing is computed."""
    with torch.device("meta"):
        block = Block(4096, 32).bfloat16()
        return block, torch.zeros(1, positions, 4096, dtype=torch.bfloat16, requires_grad=True)


SUBJECTS: dict[str, Callable[[], None]] = {
    # gradient_accumulation
    # mixed_precision
    # activation_checkpointing
    # model_parallel
    # pipeline_parallel
    # tensor_parallel
    "tensor_block": tensor_block,
    "sequence_block": sequence_block,
}

if __name__ == "__main__":
    main()
