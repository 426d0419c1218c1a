"""The training part of benchmarks/gpu.py: measure the samples per second of each contestant."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from gpu_cases import Batch, alone, our_ddp, step_of, torchs_ddp, zero_1_or_2, zero_3
from torch import nn

from distlab import launch
from distlab.bench import harness
from distlab.bench import trainer_contestants as loops
from distlab.models.gpt import GPT
from solutions.phase1_data_parallel import trainer
from solutions.phase2_advanced import mixed_precision

Train = Callable[[int], object]  # takes the number of steps
Step = Callable[[], Any]


def rates(contestants: Mapping[str, Train], size: int, steps: int, repeats: int) -> dict[str, Any]:
    """Run contestants in turns; return the samples per second and the memory per step of each."""
    found: dict[str, Any] = {}
    for name, train in contestants.items():
        _finish(train, 3)
        found[name] = {"gib_of_a_step": _peak_gib(train)}
    runs = {name: partial(_finish, train, steps) for name, train in contestants.items()}
    for row, spent in zip(found.values(), harness.in_turns(runs, repeats).tolist(), strict=True):
        row["per_s"] = harness.quartiles([steps * size / seconds for seconds in spent])
    return found


def _finish(train: Train, steps: int) -> None:
    train(steps)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak_gib(train: Train) -> float | None:
    """Return a step's peak memory in GiB, less the memory that is held between steps."""
    if not torch.cuda.is_available():
        return None
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _finish(train, 2)
    return (torch.cuda.max_memory_allocated() - held) / 2**30


# The trainer


def by_the_trainer(
    configs: Mapping[str, Any], found: Mapping[str, Any], steps: int, repeats: int
) -> Any:
    """Compare the trainer's images or tokens per second with those of torch and of bare loops."""
    device = torch.device(launch.context().device)
    with ExitStack() as stack:
        contestants: dict[str, Train] = {}
        for name, config in configs.items():
            setting = loops.Setting(config, found[name], device)
            contestants[name] = stack.enter_context(loops.trainer(setting))
        contestants["torch's DDP, reads each loss"] = loops.data_parallel(setting)
        if setting.config.is_language:  # it cannot cut weights that are channels_last
            freed = partial(loops.sharded, is_freed=True)
            contestants["torch's fully_shard, reads each loss"] = freed(setting)
        contestants["bare loop"] = bare = partial(_repeat, _bare(setting))
        contestants["bare loop, cudnn.benchmark"] = partial(_with_cudnn_benchmark, bare)
        config = setting.config
        size = config.batch_size * config.predictions_per_sample
        return rates(contestants, size, steps, repeats)


def _bare(setting: loops.Setting) -> Step:
    model, (inputs, targets) = setting.model(), loops.fixed_batch(setting, None)
    optimizer = setting.optimizer(model.parameters())

    def step() -> None:
        with setting.autocast():
            loss = loops.mean_loss(model(inputs), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _repeat(step: Step, steps: int) -> None:
    for _ in range(steps):
        step()


def _with_cudnn_benchmark(train: Train, steps: int) -> None:
    torch.backends.cudnn.benchmark = True
    train(steps)
    torch.backends.cudnn.benchmark = False


# Tokens


def _reading(model: nn.Module, batch: Batch) -> Step:
    step = step_of(alone, model, batch)
    return lambda: step().item()


def _lesson(average: trainer.AverageGradients) -> Callable[[nn.Module, Batch], Step]:
    def make(model: nn.Module, batch: Batch) -> Step:
        adam = torch.optim.AdamW(model.parameters())
        return lambda: trainer.train_step(model, adam, batch, average=average)

    return make


def _in_mixed_precision(model: nn.Module, batch: Batch) -> Step:
    adam, scaler = torch.optim.AdamW(model.parameters()), mixed_precision.LossScaler(1.0)
    step = partial(mixed_precision.mixed_precision_step, dtype=torch.bfloat16)
    return lambda: step(model, adam, scaler, batch)


WAYS: dict[str, Callable[[nn.Module, Batch], Step]] = {
    "bare loop": partial(step_of, alone),
    "bare loop, reads each loss": _reading,
    "1.11, per parameter": _lesson(trainer.average_gradients),
    "1.11, flat": _lesson(trainer.average_gradients_flat),
    "2.4": _in_mixed_precision,
    "torch's DDP": partial(step_of, torchs_ddp),
    "3.11": partial(step_of, our_ddp),
    "3.12": partial(step_of, zero_1_or_2),
    "3.14": partial(step_of, zero_3),
}


def train_tokens(sizes: Mapping[str, int], rows: int, steps: int, repeats: int) -> dict[str, Any]:
    """Compare the lessons' training steps with a plain loop, on a GPT under autocast."""
    device, vocabulary = torch.device(launch.context().device), sizes["vocab_size"]
    tokens = torch.randint(vocabulary, (rows, sizes["context"] + 1), device=device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    contestants, failed = dict[str, Train](), dict[str, str]()
    for name, make in WAYS.items():
        torch.manual_seed(0)
        try:
            step = _in_16_bits(make(GPT(**sizes).to(device), batch), device)
            step()
            contestants[name] = partial(_repeat, step)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    return {"failed": failed, "tokens": rates(contestants, batch[0].numel(), steps, repeats)}


def _in_16_bits(step: Step, device: torch.device) -> Step:
    """Return a step that enters autocast anew each time, as autocast's cached weights go stale."""

    def run() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            step()

    return run
