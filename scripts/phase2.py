"""What the pictures and the quoted numbers of phase2_advanced/guidelines.md show.

A torch.distributed program like any other: it says ``init_process_group`` and runs one subject.

    distlab sim --ranks 4 --plot gpipe.png scripts/phase2.py gpipe
"""

import sys
from collections.abc import Callable

import torch.distributed as dist


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

SUBJECTS: dict[str, Callable[[], None]] = {
    # gradient_accumulation
    # mixed_precision
    # activation_checkpointing
    # model_parallel
    # pipeline_parallel
    # tensor_parallel
}

if __name__ == "__main__":
    main()
