"""Compare your pipeline with torch.distributed.pipelining.

distlab sim --ranks 4 examples/in_pytorch/pipeline.py
torchrun --nproc-per-node 2 examples/in_pytorch/pipeline.py
"""

import copy
from typing import Any

import lesson
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn.functional import cross_entropy

from phase2_advanced.given import Schedule, cross_entropy_sum

MICRO_BATCHES = 8


def compare(name: str, schedule: Schedule, blocks: list[nn.Module], run_schedule: Any) -> None:
    """Run 8 micro-batches through the blocks, rank by rank, in both ways."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4 * MICRO_BATCHES, 8, generator=generator)
    targets = torch.randint(8, (4 * MICRO_BATCHES,), generator=generator)
    parts = zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True)
    ours, theirs = (nn.ModuleList(copy.deepcopy(blocks[rank::size])) for _ in range(2))
    loss = run_schedule(schedule, [*ours], [*parts], cross_entropy_sum)

    stages = [
        pipelining.PipelineStage(block, rank + i * size, len(blocks), torch.device("cpu"))
        for i, block in enumerate(theirs)
    ]
    cut = stages if name == "ScheduleInterleaved1F1B" else stages[0]
    pipeline = getattr(pipelining, name)(cut, MICRO_BATCHES, cross_entropy)
    losses: list[Tensor] = []
    pipeline.step(*[inputs] * (rank == 0), target=targets, losses=losses)  # the rest gets messages

    mean = torch.stack(losses).mean() if losses else torch.zeros(())  # only the last rank has them
    dist.broadcast(mean, src=size - 1)
    lesson.compare(f"{name}, loss", [torch.tensor(loss)], [mean])
    lesson.compare(f"{name}, gradients", lesson.gradients(ours), lesson.gradients(theirs))


def main() -> None:
    """Compare GPipe, 1F1B, and 1F1B with two chunks per stage."""
    dist.init_process_group()
    size = dist.get_world_size()
    course = lesson.load("pipeline_parallel", "2.9", "2.10", "2.11")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2 * size)]
    pairs: list[nn.Module] = [nn.Sequential(*blocks[i : i + 2]) for i in range(0, 2 * size, 2)]
    gpipe = course.gpipe_schedule(size, MICRO_BATCHES)
    compare("ScheduleGPipe", gpipe, pairs, course.run_schedule)
    one_f_one_b = course.one_f_one_b_schedule(size, MICRO_BATCHES)
    compare("Schedule1F1B", one_f_one_b, pairs, course.run_schedule)
    interleaved = course.interleaved_schedule(size, MICRO_BATCHES, 2)
    compare("ScheduleInterleaved1F1B", interleaved, [*blocks], course.run_schedule)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
