"""What the pictures and the quoted numbers of phase2_advanced/guidelines.md show.

A torch.distributed program like any other: it says ``init_process_group`` and runs one subject.

    distlab sim --ranks 4 --plot gpipe.png scripts/phase2.py gpipe
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from solutions.phase2_advanced import gradient_accumulation


def main() -> None:
    """Run the subject named on the command line."""
    dist.init_process_group()
    SUBJECTS[sys.argv[1]]()
    dist.destroy_process_group()


# gradient_accumulation


def memory_of_micro_batches() -> None:
    """Do one step on 2,048 rows, on rank r in 2^r micro-batches, each rank by itself."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(2048, 256), torch.randint(256, (2048,))
    gradient_accumulation.accumulate_step(model, optimizer, batch, 2048 >> dist.get_rank())


def accumulate_over_ranks() -> None:
    """Do one step of two layers on 4, 3, 4 and 2 micro-batches of 512 rows."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = (2048, 1536, 2048, 1024)[dist.get_rank()]
    batch = torch.randn(rows, 512), torch.randint(10, (rows,))
    gradient_accumulation.accumulate_step_over_ranks(model, optimizer, batch, 512)


# mixed_precision

# activation_checkpointing

# model_parallel

# pipeline_parallel

# tensor_parallel

SUBJECTS: dict[str, Callable[[], None]] = {
    # gradient_accumulation
    "memory_of_micro_batches": memory_of_micro_batches,
    "accumulate_over_ranks": accumulate_over_ranks,
    # mixed_precision
    # activation_checkpointing
    # model_parallel
    # pipeline_parallel
    # tensor_parallel
}

if __name__ == "__main__":
    main()
