"""What the pictures and the quoted numbers of phase2_advanced/guidelines.md show.

A torch.distributed program like any other: it says ``init_process_group`` and runs one subject.

    distlab sim --ranks 4 --plot gpipe.png scripts/phase2.py gpipe
"""

import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phase2_advanced.given import Group, Schedule, cross_entropy_sum
from solutions.phase2_advanced import model_parallel, pipeline_parallel


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

STAGES, MICRO_BATCHES, LAYERS = 4, 8, 4  # LAYERS on each stage, of WIDTH, with ROWS at once
WIDTH, ROWS = 200, 50


def gpipe() -> None:
    """Run eight micro-batches through four stages, all forward and then all backward."""
    _run_pipeline(pipeline_parallel.gpipe_schedule(STAGES, MICRO_BATCHES), num_chunks=1)


def one_f_one_b() -> None:
    """Run them by 1F1B."""
    _run_pipeline(pipeline_parallel.one_f_one_b_schedule(STAGES, MICRO_BATCHES), num_chunks=1)


def interleaved() -> None:
    """Run them by interleaved 1F1B, in two chunks of two layers on each stage."""
    _run_pipeline(pipeline_parallel.interleaved_schedule(STAGES, MICRO_BATCHES, 2), num_chunks=2)


def _run_pipeline(schedule: Schedule, num_chunks: int) -> None:
    pipeline_parallel.send_tensors, pipeline_parallel.recv_tensors = _send_plain, _receive_plain
    layers = range(LAYERS // num_chunks)
    chunks = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in layers)) for _ in range(num_chunks)]
    inputs = torch.ones(ROWS, WIDTH, requires_grad=True)  # else stage 0 had less to compute
    targets = torch.zeros(ROWS, dtype=torch.long)
    batches = [(inputs, targets)] * MICRO_BATCHES
    pipeline_parallel.run_schedule(schedule, chunks, batches, cross_entropy_sum)


def _send_plain(tensors: Sequence[Tensor], dst: int, group: Group = None) -> list[dist.Work]:
    """Send without a header, so that each tensor is one arrow: all have the same shape here."""
    return [dist.isend(x.detach(), dst) for x in tensors]


def _receive_plain(src: int, group: Group = None) -> list[Tensor]:
    x = torch.empty(ROWS, WIDTH)
    dist.recv(x, src)
    return [x.requires_grad_()]


# tensor_parallel

SUBJECTS: dict[str, Callable[[], None]] = {
    # gradient_accumulation
    # mixed_precision
    # activation_checkpointing
    # model_parallel
    "model_parallel": four_stages,
    # pipeline_parallel
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
    # tensor_parallel
}

if __name__ == "__main__":
    main()
