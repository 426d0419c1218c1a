"""What the pictures and the quoted numbers of phase2_advanced/guidelines.md show.

A torch.distributed program like any other: it says ``init_process_group`` and runs one subject.

    distlab sim --ranks 4 --plot gpipe.png scripts/phase2.py gpipe
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from solutions.phase2_advanced import model_parallel


def main() -> None:
    """Run the subject named on the command line."""
    dist.init_process_group()
    SUBJECTS[sys.argv[1]]()
    dist.destroy_process_group()


# gradient_accumulation

# mixed_precision

# activation_checkpointing

# model_parallel


def four_stages() -> None:
    """Run one step of stages of four layers each, with a batch of 1,024 rows."""
    stage = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    runner = model_parallel.StageRunner(stage)
    output = runner.forward(torch.ones(1024, 1024)) if runner.rank == 0 else runner.forward()
    runner.backward(output.sum() if isinstance(output, torch.Tensor) else None)


# pipeline_parallel

# tensor_parallel

SUBJECTS: dict[str, Callable[[], None]] = {
    # gradient_accumulation
    # mixed_precision
    # activation_checkpointing
    # model_parallel
    "model_parallel": four_stages,
    # pipeline_parallel
    # tensor_parallel
}

if __name__ == "__main__":
    main()
