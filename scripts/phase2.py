"""What the pictures and the quoted numbers of phase2_advanced/guidelines.md show.

A torch.distributed program like any other: it says ``init_process_group`` and runs one subject.

    distlab sim --ranks 4 --plot gpipe.png scripts/phase2.py gpipe
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from solutions.phase2_advanced.activation_checkpointing import checkpoint_sequential


def main() -> None:
    """Run the subject named on the command line."""
    dist.init_process_group()
    SUBJECTS[sys.argv[1]]()
    dist.destroy_process_group()


# gradient_accumulation

# mixed_precision

# activation_checkpointing


def checkpoint_segments() -> None:
    """Do a step of 36 layers: rank 0 keeps all activations, the others take 36 to 1 segments."""
    options = {"device": torch.device("meta"), "dtype": torch.bfloat16}
    layers = [nn.Sequential(nn.Linear(4096, 4096, **options), nn.ReLU()) for _ in range(36)]
    x = torch.empty(32768, 4096, **options, requires_grad=True)
    segments = (0, 36, 12, 6, 3, 1)[dist.get_rank()]
    y = checkpoint_sequential(layers, segments, x) if segments else nn.Sequential(*layers)(x)
    y.sum().backward()


# model_parallel

# pipeline_parallel

# tensor_parallel

SUBJECTS: dict[str, Callable[[], None]] = {
    # gradient_accumulation
    # mixed_precision
    # activation_checkpointing
    "checkpoint_segments": checkpoint_segments,
    # model_parallel
    # pipeline_parallel
    # tensor_parallel
}

if __name__ == "__main__":
    main()
