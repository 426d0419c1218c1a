"""What the pictures and the quoted numbers of phase3_multi_node/guidelines.md show.

A torch.distributed program like any other: it says ``init_process_group`` and runs one subject.

    distlab sim --ranks 4 --plot ddp.png scripts/phase3.py ddp
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from solutions.phase3_multi_node import ddp


def main() -> None:
    """Run the subject named on the command line."""
    dist.init_process_group()
    SUBJECTS[sys.argv[1]]()
    dist.destroy_process_group()


# ddp

LAYERS, WIDTH, ROWS = 8, 4096, 2048
BUCKETS = {"bucket_bytes": 2 * 2 * WIDTH**2, "first_bucket_bytes": 2 * WIDTH**2}


def step_with(wrap: Callable[..., Any], **limits: int) -> None:
    """Do a step of eight layers in 16 bits; on meta, where nothing is computed."""
    with torch.device("meta"):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        model = nn.Sequential(*layers).bfloat16()
        x = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
    wrapped = wrap(model, **limits)
    wrapped(x).sum().backward()
    wrapped.finish_gradient_synchronization()


SUBJECTS: dict[str, Callable[[], None]] = {
    "ddp": partial(step_with, ddp.DistributedDataParallel, **BUCKETS),
    "ddp_flat": partial(step_with, ddp.FlatDataParallel),
    "ddp_per_parameter": partial(step_with, ddp.PerParameterDataParallel),
}

if __name__ == "__main__":
    main()
