"""The programs behind the pictures and numbers in phase2_advanced/guidelines.md.

A torch.distributed program like any other: it calls ``init_process_group`` and runs one function.

    distlab sim --ranks 4 --plot gpipe.png scripts/phase2.py gpipe
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

from distlab.data.built_in import load_digits
from distlab.models.gpt import GPT
from phase2_advanced.given import Batch, Block, Group, LossSum, Schedule, cross_entropy_sum
from solutions.phase2_advanced import gradient_accumulation, pipeline_parallel, tensor_parallel
from solutions.phase2_advanced.activation_checkpointing import checkpoint_sequential
from solutions.phase2_advanced.mixed_precision import LossScaler, mixed_precision_step
from solutions.phase2_advanced.model_parallel import StageRunner


def main() -> None:
    """Run the function of this file that the command line names."""
    dist.init_process_group()
    globals()[sys.argv[1]]()
    dist.destroy_process_group()


# where the memory goes


def memory_of_two_steps() -> None:
    """Take two steps of a GPT with 110 million parameters, on 4 sequences of 1,024 tokens."""
    with torch.device("meta"):
        model = GPT(8192, 1024, width=1024, layers=8, heads=16)
        tokens = torch.zeros(4, 1024, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()


# gradient_accumulation


def memory_of_micro_batches() -> None:
    """Take one step on 2,048 rows: rank r uses 2^r micro-batches, and no rank communicates."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(2048, 256), torch.randint(256, (2048,))
    gradient_accumulation.accumulate_step(model, optimizer, batch, 2048 >> dist.get_rank())


def accumulate_over_ranks() -> None:
    """Take one step of a two-layer model; ranks have 4, 3, 4 and 2 micro-batches of 512 rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    rows = (2048, 1536, 2048, 1024)[dist.get_rank()]
    batch = torch.randn(rows, 512), torch.randint(10, (rows,))
    gradient_accumulation.accumulate_step_over_ranks(model, optimizer, batch, 512)


# mixed_precision


def step_in_float16() -> None:
    """Take one step of a two-layer model on 256 samples per rank, computed in 16 bits."""
    _step_of_two_layers(cross_entropy_sum)


def step_in_float32() -> None:
    """Take the same step without autocast."""
    _step_of_two_layers(replace(cross_entropy_sum, sum_of=_without_autocast))


def _step_of_two_layers(loss_sum: LossSum) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    batch = torch.randn(256, 1024), torch.randint(10, (256,))
    mixed_precision_step(model, optimizer, LossScaler(), batch, loss_sum=loss_sum)


def _without_autocast(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return cross_entropy_sum.sum_of(model, batch)


def precisions() -> None:
    """Train four times on 1,280 digits with a small loss weight; print first and last losses."""
    rows = {
        "float32": _losses(_digits_model(), LossScaler(1.0), _small_loss_in_float32),
        "float16 everywhere": _losses_of_half(_digits_model().half()),
        "float16, scale 1": _losses(_digits_model(), LossScaler(1.0), _small_loss),
        "float16, scaled": _losses(_digits_model(), LossScaler(), _small_loss),
    }
    if dist.get_rank() == 0:
        print(f"{'':20}{'first':>7}{'last':>7}")
        for name, losses in rows.items():
            print(f"{name:20}{losses[0]:7.2f}{losses[-1]:7.2f}")


def _digits_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def _share_of_digits() -> Batch:
    share = Subset(load_digits().train, range(dist.get_rank(), 1280, dist.get_world_size()))
    images, labels = next(iter(DataLoader(share, batch_size=len(share))))
    return images, labels


SMALL_WEIGHT, NUM_STEPS, LR = 1e-4, 60, 0.01


def _losses(
    model: nn.Module, scaler: LossScaler, sum_of: Callable[[nn.Module, Batch], Tensor]
) -> list[float]:
    loss_sum = replace(cross_entropy_sum, sum_of=sum_of)
    optimizer, batch = torch.optim.Adam(model.parameters(), lr=LR), _share_of_digits()
    steps = [
        mixed_precision_step(model, optimizer, scaler, batch, loss_sum=loss_sum)
        for _ in range(NUM_STEPS)
    ]
    return [step.loss / SMALL_WEIGHT for step in steps]


def _small_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss with a small weight, as if it were one of several losses."""
    return SMALL_WEIGHT * cross_entropy_sum.sum_of(model, batch)


def _small_loss_in_float32(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return _small_loss(model, batch)


def _losses_of_half(model: nn.Module) -> list[float]:
    """Train entirely in float16: weights, gradients and Adam's state."""
    optimizer, (images, labels) = torch.optim.Adam(model.parameters(), lr=LR), _share_of_digits()
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = SMALL_WEIGHT * cross_entropy(model(images.half()), labels)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
        losses.append(loss.item() / SMALL_WEIGHT)
    return losses


# activation_checkpointing


def checkpoint_segments() -> None:
    """Run a step of 36 layers: rank 0 keeps all activations, the others use 36 to 1 segments."""
    options = {"device": torch.device("meta"), "dtype": torch.bfloat16}
    layers = [nn.Sequential(nn.Linear(4096, 4096, **options), nn.ReLU()) for _ in range(36)]
    x = torch.empty(32768, 4096, **options, requires_grad=True)
    segments = (0, 36, 12, 6, 3, 1)[dist.get_rank()]
    y = checkpoint_sequential(layers, segments, x) if segments else nn.Sequential(*layers)(x)
    y.sum().backward()


# model_parallel


def model_parallel() -> None:
    """Run one step with four layers per stage, on a batch of 1,024 rows."""
    stage = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    runner = StageRunner(stage)
    output = runner.forward(torch.ones(1024, 1024)) if runner.rank == 0 else runner.forward()
    runner.backward(output.sum() if isinstance(output, torch.Tensor) else None)


# pipeline_parallel

STAGES, MICRO_BATCHES, LAYERS = 4, 8, 4  # LAYERS is the number per stage
WIDTH, ROWS = 200, 50


def gpipe() -> None:
    """Run eight micro-batches through four stages, all forward and then all backward."""
    _run_pipeline(pipeline_parallel.gpipe_schedule(STAGES, MICRO_BATCHES), num_chunks=1)


def one_f_one_b() -> None:
    """Run the same micro-batches with 1F1B."""
    _run_pipeline(pipeline_parallel.one_f_one_b_schedule(STAGES, MICRO_BATCHES), num_chunks=1)


def interleaved() -> None:
    """Run the same micro-batches with interleaved 1F1B: two chunks of two layers per stage."""
    _run_pipeline(pipeline_parallel.interleaved_schedule(STAGES, MICRO_BATCHES, 2), num_chunks=2)


def _run_pipeline(schedule: Schedule, num_chunks: int) -> None:
    pipeline_parallel.send_tensors, pipeline_parallel.recv_tensors = _send_plain, _receive_plain
    layers = range(LAYERS // num_chunks)
    chunks = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in layers)) for _ in range(num_chunks)]
    inputs = torch.ones(ROWS, WIDTH, requires_grad=True)  # otherwise, stage 0 would compute less
    targets = torch.zeros(ROWS, dtype=torch.long)
    batches = [(inputs, targets)] * MICRO_BATCHES
    pipeline_parallel.run_schedule(schedule, chunks, batches, cross_entropy_sum)


def _send_plain(tensors: Sequence[Tensor], dst: int, group: Group = None) -> list[dist.Work]:
    """Send an output without a header, so that it is drawn as one arrow."""
    return [dist.isend(tensors[0].detach(), dst)]  # type: ignore[list-item]


def _receive_plain(src: int, group: Group = None) -> list[Tensor]:
    """Receive an output, and say that all micro-batches are of one kind."""
    x = torch.empty(ROWS, WIDTH)
    dist.recv(x, src)
    return [x.requires_grad_(), torch.zeros(MICRO_BATCHES, dtype=torch.int64)]


# tensor_parallel


def tensor_block() -> None:
    """Run a block with split weights, forward and backward, on 2,048 positions of width 4,096."""
    block, x = large_block(2048)
    tensor_parallel.parallelize_attention(block.attention)
    tensor_parallel.parallelize_mlp(block.mlp)
    block(x).sum().backward()


def sequence_block() -> None:
    """Run the block with everything outside attention and MLP split by positions as well."""
    block, x = large_block(2048 // dist.get_world_size())
    tensor_parallel.parallelize_block(block)
    block(x).sum().backward()


def positions_kept() -> None:
    """Run 8 blocks that keep all positions of what attention and the MLP read."""
    run_blocks(gather_again=False)


def positions_gathered_again() -> None:
    """Run 8 blocks that keep a rank's own positions, and gather the others once more."""
    run_blocks(gather_again=True)


def run_blocks(*, gather_again: bool) -> None:
    """Run 8 blocks with split positions, forward and backward, on 16,384 positions."""
    blocks = []
    for _ in range(8):
        block, x = large_block(16_384 // dist.get_world_size())
        tensor_parallel.parallelize_block(block, gather_again=gather_again)
        blocks.append(block)
    torch.nn.Sequential(*blocks)(x).sum().backward()


def large_block(positions: int) -> tuple[Block, torch.Tensor]:
    """Return a block with 32 heads and its input, in 16 bits on meta, where nothing is computed."""
    with torch.device("meta"):
        block = Block(4096, 32).bfloat16()
        return block, torch.zeros(1, positions, 4096, dtype=torch.bfloat16, requires_grad=True)


if __name__ == "__main__":
    main()
