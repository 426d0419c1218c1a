"""The course's own trainer on real data, for `distlab train` and `distlab demo`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab import chosen, data, launch, models, parallel
from distlab.chosen import SOLVED
from distlab.grade.outcomes import Outcome, verdict_on
from distlab.grade.submission import Submission
from distlab.launch.launchers import launched, launcher_of_several
from distlab.parallel import Parallelism, Part
from distlab.process_group.base import BaseGroup
from distlab.process_group.call import Counts
from distlab.util.text import bytes_text, counted, rank_names, seconds_text

if TYPE_CHECKING:
    from distlab.lessons import EpochResult

DEFAULT_WORKERS = 4
DEFAULT_BATCH_SIZE = 64


class ConfigError(ValueError):
    """Options do not fit together; the message names options that do."""


class DivergedError(RuntimeError):
    """A loss is no longer finite; the message says when and where, and what to try."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run. ``make_config`` fills in fields that depend on others."""

    dataset: str
    model: str
    parallelism: Parallelism  # with dp alone, each rank holds the whole model
    epochs: int
    batch_size: int  # total number of samples over all ranks
    lr: float
    lessons: Submission = SOLVED  # files that contain the trainer
    all_reduce: str = "native"  # key of ALL_REDUCES
    gradients: str = "per_parameter"  # key of AVERAGE_GRADIENTS
    backend: str = "auto"
    cluster: str | None = None  # name of a preset, for the backend sim
    device: str = "auto"
    dtype: str = "float32"
    seed: int = 0
    data_root: Path | None = None

    @property
    def num_workers(self) -> int:
        """Number of ranks."""
        return self.parallelism.num_ranks


@dataclass(frozen=True)
class Recipe:
    """The optimizer for a model."""

    optimizer: str
    lr: float

    def build(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Create the optimizer for ``model``'s parameters."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
        return torch.optim.AdamW(model.parameters(), lr=lr)


RECIPES = {
    "cnn": Recipe("sgd", 0.05),
    "resnet18": Recipe("sgd", 0.01),
    "vit": Recipe("adamw", 1e-3),
    "gpt": Recipe("adamw", 3e-3),
}


# For gpt, every pixel is a token. A step on 16 images of the usual shape, 3 x 32 x 32, takes ten
# seconds; with the shape below, it takes less than a tenth of a second.
SYNTHETIC_FOR_GPT = {"image_shape": (1, 8, 8), "train_size": 512, "test_size": 128}


def make_config(
    *,
    dataset: str,
    model: str | None = None,
    num_workers: int | None = None,
    parallelism: str | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    backend: str = "auto",
    impl: str = "solution",
    all_reduce: str = "native",
    **others: Any,
) -> TrainConfig:
    """Make a configuration, with defaults for options that are None, such as the batch size.

    Args:
        model: Name of the model; None means gpt if ``parallelism`` mentions pp or tp, and cnn
            otherwise. Even pp=1 means gpt, for comparisons with training in one process.
        parallelism: Sizes in the format of ``Parallelism.parse``; None for data parallelism alone.
        impl: "solution", or "mine" for the learner's own trainer.
        others: Further fields of ``TrainConfig``.

    Raises:
        ConfigError: The batch cannot be shared equally; the learning rate is not positive and
            finite; torchrun, mpirun or srun has started a different number of workers; or the model
            or the world cannot be split as requested.
        NotThereError: This copy has no solutions, or the learner's trainer is not written yet.
    """
    sizes = _parallelism(parallelism, num_workers, backend)
    model = _model_name(model, sizes, parallelism or "")
    return TrainConfig(
        dataset=dataset,
        model=model,
        parallelism=sizes,
        backend=backend,
        batch_size=_batch_size(batch_size, sizes),
        lr=_learning_rate(lr, RECIPES[model].lr),
        lessons=chosen.find_trainer(impl, all_reduce, sizes.functions),
        all_reduce=all_reduce,
        **others,
    )


def _parallelism(requested: str | None, num_workers: int | None, backend: str) -> Parallelism:
    if requested is None:
        return Parallelism(dp=_workers(num_workers, backend))
    with _refusals(requested):
        sizes = Parallelism.parse(requested)
        if num_workers:
            sizes.check_world(num_workers, "--num-workers asks for", "leave --num-workers out")
        if world := launched(backend):
            clause, advice = f"{world.launcher} started", f"start {sizes.num_ranks}"
            sizes.check_world(world.world_size, clause, advice)
    return sizes


@contextmanager
def _refusals(parallelism: object) -> Iterator[None]:
    """Turn an error about ``--parallelism`` into one line that begins with the option."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"--parallelism {parallelism}: {error}") from None


def _model_name(requested: str | None, sizes: Parallelism, parallelism: str) -> str:
    if sizes.splits_model and requested not in (None, "gpt"):
        raise ConfigError(
            f"--parallelism {sizes} splits the model, and only gpt can be split: leave --model "
            f"{requested} out, or use --parallelism dp={sizes.num_ranks}"
        )
    return requested or ("gpt" if "pp" in parallelism or "tp" in parallelism else "cnn")


def _batch_size(requested: int | None, sizes: Parallelism) -> int:
    dp = sizes.dp
    if requested is None:
        return -(-max(DEFAULT_BATCH_SIZE, dp * sizes.pp) // dp) * dp
    if requested % dp:
        below = requested // dp * dp
        nearest = f"{below} or {below + dp}" if below else str(dp)
        sharers = counted(dp, "replica" if sizes.splits_model else "worker")
        raise ConfigError(
            f"--batch-size {requested} cannot be shared equally by {sharers}: use {nearest}"
        )
    with _refusals(sizes):
        sizes.check_batch(requested)
    return requested


def _learning_rate(requested: float | None, default: float) -> float:
    lr = default if requested is None else requested
    if not 0 < lr < math.inf:  # nan fails this comparison, too
        raise ConfigError(
            f"--lr {lr} is not a learning rate: it must be above 0 and finite, say {default}"
        )
    return lr


def _workers(requested: int | None, backend: str) -> int:
    world = launched(backend)
    if world and requested not in (None, world.world_size):
        raise ConfigError(
            f"{world.launcher} started {counted(world.world_size, 'worker')} and --num-workers "
            f"asks for {requested}: leave --num-workers out under {world.launcher}"
        )
    return world.world_size if world else requested or DEFAULT_WORKERS


def check_is_alone() -> None:
    """Refuse to start workers if mpirun, torchrun or srun has already started several processes.

    Raises:
        ConfigError: This process is one of several.
    """
    if launcher := launcher_of_several():
        raise ConfigError(f"this starts its own workers: run it alone, without {launcher}")


def train(config: TrainConfig) -> list[EpochResult]:
    """Train on ``config.num_workers`` ranks; return rank 0's history.

    Raises:
        ConfigError: The batch is larger than the data set.
        DivergedError: The loss is no longer finite.
        LaunchError: A rank failed.
    """
    answers = _answers(config)
    answer = answers[0]
    if isinstance(answer, ConfigError):
        raise answer
    if isinstance(answer, Diverged):
        raise DivergedError(_how_it_diverged(config, answers))
    return answer


def _answers(config: TrainConfig) -> list[list[EpochResult] | ConfigError | Diverged]:
    """Run the ranks; raise NotThereError if the learner's code is unfinished or fails to import."""
    try:
        return launch.run(
            _history_or_refusal,
            config.num_workers,
            config,
            backend=config.backend,
            cluster=config.cluster,
            device=config.device,
            timeout_s=None,
        )
    except launch.LaunchError as error:
        verdict = verdict_on(error)
        if verdict.missing or verdict.outcome is Outcome.IMPORT_ERROR:
            text = f"{verdict.message}\n{verdict.details}".rstrip()
            raise chosen.NotThereError(text) from None
        raise


def _history_or_refusal(config: TrainConfig) -> list[EpochResult] | ConfigError | Diverged:
    """Train; if an error ends training on all ranks, return it instead of raising it."""
    try:
        return train_on_rank(config)
    except ConfigError as refusal:
        return refusal
    except _DivergedHere as error:
        return error.diverged


def train_on_rank(config: TrainConfig) -> list[EpochResult]:
    """Run one worker: load the data, build the model, and train it."""
    here = launch.context()
    check_device(config, here.device)
    splits = _load(config)
    check_batch_size(config, len(splits.train))
    model = _model(config, splits, here.device)
    headline = _headline(config, here.device, splits, model)
    part = _part(config, model)
    trainer = _trainer(config, part, here.device)
    trainer.log.info(headline)
    if config.parallelism.splits_model:
        trainer.log.info(part.describe(config.batch_size))
    earlier, start_s = _counts(part), time.perf_counter()
    history: list[EpochResult] = trainer.fit(
        splits.train,
        splits.test,
        epochs=config.epochs,
        global_batch_size=config.batch_size,
        seed=config.seed,
    )
    _check_test_losses(history)
    for group, counts in _counts(part).items():
        trainer.log.info(_traffic(group, counts - earlier[group], config.epochs))
    if config.backend == "sim":
        trainer.log.info(_virtual_time(config.cluster, time.perf_counter() - start_s))
    return history


def _model(
    config: TrainConfig, splits: data.Splits | data.TokenSplits, device: torch.device
) -> nn.Module:
    """Build the whole model, which is the same on all ranks."""
    torch.manual_seed(config.seed)
    shape, num_classes = splits.image_shape, splits.num_classes
    model = models.build(config.model, image_shape=shape, num_classes=num_classes)
    dtype = getattr(torch, config.dtype)
    model.to(device=device, dtype=dtype)
    model.register_forward_pre_hook(lambda _, inputs: _cast(inputs, dtype))
    return model


def _part(config: TrainConfig, model: nn.Module) -> Part:
    """Return this rank's part of the model: the whole model, or a part of a gpt."""
    if not config.parallelism.splits_model:
        return Part(model, {}, config.parallelism)
    gpt = cast("models.GPT", model)
    with _refusals(config.parallelism):
        parallel.check(gpt, config.parallelism)
    lesson = partial(chosen.lesson, config.lessons)
    return parallel.split(gpt, config.parallelism, lesson)


def _trainer(config: TrainConfig, part: Part, device: torch.device) -> Any:
    optimizer = RECIPES[config.model].build(part.model, config.lr)
    parts = chosen.load(config.lessons)
    all_reduce, average = parts.all_reduces[config.all_reduce], parts.averages[config.gradients]
    how = {"all_reduce": all_reduce, "average": average}
    trainer = parts.trainer(
        part.model, optimizer, **how, device=device, group=part.groups.get("dp")
    )
    if config.parallelism.splits_model:
        part.take_over(trainer, optimizer, **how)
    trainer.step = _Watched(trainer.step, part.layers)
    return trainer


@dataclass(frozen=True)
class Diverged:
    """The step at which a rank got a loss that is not finite; the same step on all ranks."""

    step: int  # counted from 1
    loss: float
    is_mine: bool  # True if this rank's own outputs were not finite


class _DivergedHere(Exception):
    def __init__(self, diverged: Diverged) -> None:
        super().__init__(diverged)
        self.diverged = diverged


class _Watched:
    """Wraps a trainer's step, and ends training at the first loss that is not finite.

    ``train_step`` returns the same loss on all ranks, so all of them end at the same step.
    """

    def __init__(self, step: Callable[[Any], float], model: nn.Module) -> None:
        self._step, self._count = step, 0
        self._outputs = torch.zeros(0)
        model.register_forward_hook(self._keep)

    def __call__(self, batch: Any) -> float:
        loss = self._step(batch)
        self._count += 1
        if not math.isfinite(loss):
            is_mine = not bool(torch.isfinite(self._outputs).all())
            raise _DivergedHere(Diverged(self._count, loss, is_mine))
        return loss

    def _keep(self, _model: nn.Module, _inputs: object, outputs: Tensor) -> None:
        self._outputs = outputs.detach()


def _check_test_losses(history: Sequence[EpochResult]) -> None:
    """Check that the test losses are finite; only they reveal that the very last step diverged."""
    step = 0
    for result in history:
        step += len(result.step_losses)
        if not math.isfinite(result.test_loss):
            raise _DivergedHere(Diverged(step, result.test_loss, is_mine=False))


def _how_it_diverged(config: TrainConfig, answers: Sequence[object]) -> str:
    """Return one line that says where and when the loss stopped being finite, and what to try."""
    met = [answer for answer in answers if isinstance(answer, Diverged)]
    ranks = [rank for rank, answer in enumerate(met) if answer.is_mine]
    everywhere = len(ranks) in (0, config.num_workers)
    where = f"all {config.num_workers} ranks" if everywhere else rank_names(ranks)
    default = RECIPES[config.model].lr
    smaller = default if config.lr > default else config.lr / 10
    return (
        f"step {met[0].step}: the loss is {met[0].loss}, which is not a finite number any more "
        f"(first seen on {where}). Try a smaller --lr than {config.lr:g}, say {smaller:g}"
    )


def _counts(part: Part) -> dict[str, Counts]:
    """Return the collective counts so far, by group; empty on gloo and NCCL, which do not count."""
    several = {f" ({name})": group for name, group in part.groups.items() if group.size() > 1}
    groups: Mapping[str, object] = several or {"": dist.group.WORLD}
    return {
        name: copy(group.counts) for name, group in groups.items() if isinstance(group, BaseGroup)
    }


def _traffic(group: str, counts: Counts, epochs: int) -> str:
    """Return a line such as ``collectives per epoch: 177 all_reduce calls, 4.66 MiB``."""
    totals = (
        f"{calls / epochs:,.0f} {name} calls, {bytes_text(counts.num_bytes[name] / epochs)}"
        for name, calls in counts.calls.items()
    )
    return f"collectives per epoch{group}: {'; '.join(totals) or 'none'}"


def _load(config: TrainConfig) -> data.Splits | data.TokenSplits:
    """Load the images; for gpt, turn them into sequences of tokens."""
    if config.model != "gpt":
        return data.load(config.dataset, root=config.data_root)
    options = SYNTHETIC_FOR_GPT if config.dataset == "synthetic" else {}
    return data.tokens(data.load(config.dataset, root=config.data_root, **options))


def check_device(config: TrainConfig, device: torch.device) -> None:
    """Refuse replicas on GPUs with gloo, which sends GPU tensors only in collectives."""
    dp = config.parallelism.dp
    if device.type == "cuda" and dp > 1 and dist.get_backend() == "gloo":
        raise ConfigError(
            f"--device cuda: gloo cannot send a GPU's tensors from rank to rank, as {dp} replicas "
            "do. Leave --device out, or use NCCL, which needs a GPU for each rank: this machine "
            f"has {torch.cuda.device_count()}"
        )


def check_batch_size(config: TrainConfig, num_images: int) -> None:
    """Refuse a batch that is larger than the training set."""
    if config.batch_size <= num_images:
        return
    dp = config.parallelism.dp
    largest = num_images // dp * dp
    raise ConfigError(
        f"--batch-size {config.batch_size} is more than the {num_images} training images of "
        f"{config.dataset}: use at most {largest or f'{num_images} workers'}"
    )


def _cast(inputs: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Convert images to the model's dtype; tokens keep theirs."""
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def _headline(
    config: TrainConfig,
    device: torch.device,
    splits: data.Splits | data.TokenSplits,
    model: nn.Module,
) -> str:
    images = f"{len(splits.train):,} images"
    if isinstance(splits, data.TokenSplits):
        images += f" of {splits.sequence_length:,} tokens"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dp = config.parallelism.dp
    where = _simulated(config.cluster) if config.backend == "sim" else device.type
    return (
        f"{config.model} ({parameters:,} parameters) on {config.dataset} ({images}), {where}, "
        f"batch {config.batch_size} = {dp} x {config.batch_size // dp}, "
        f"{config.all_reduce} all-reduce"
    )


def _simulated(cluster: str | None) -> str:
    """Return the name of the cluster, with a note that the times are virtual."""
    name = f"cluster {cluster}" if cluster else "cluster: one switch with a GPU per worker"
    return f"simulated {name}, times are virtual, not measured"


def _virtual_time(cluster: str | None, seconds: float) -> str:
    computed = "" if cluster else ", of messages alone: --cluster dgx-h100 computes too"
    return f"virtual time {seconds_text(seconds)}{computed}"


def report(config: TrainConfig, history: list[EpochResult]) -> None:
    """Print the final test accuracy, in one process only."""
    if int(os.environ.get("RANK", "0")) == 0:
        best = max(history, key=lambda result: result.test_accuracy)
        epochs = counted(config.epochs, "epoch")
        print(
            f"test accuracy {history[-1].test_accuracy:.1%} after {epochs} "
            f"(best {best.test_accuracy:.1%} in epoch {best.epoch})"
        )
