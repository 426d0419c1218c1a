"""The course's own trainer, run on real data: what `distlab train` and `distlab demo` do."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from distlab import data, launch, models
from distlab.launch.world import started_by_torchrun
from solutions.phase1_data_parallel.collectives import ALL_REDUCES
from solutions.phase1_data_parallel.trainer import EpochResult, Trainer

DEFAULT_WORKERS = 4
DEFAULT_BATCH_SIZE = 64


class ConfigError(ValueError):
    """Options that do not fit together; the message names ones that do."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run. ``make_config`` fills in what depends on other fields."""

    dataset: str
    model: str
    num_workers: int  # ranks
    epochs: int
    batch_size: int  # of all ranks together
    lr: float
    all_reduce: str  # key of ALL_REDUCES
    backend: str = "auto"
    cluster: str | None = None  # preset, for backend sim
    device: str = "auto"
    dtype: str = "float32"
    seed: int = 0
    data_root: Path | None = None


@dataclass(frozen=True)
class Recipe:
    """The optimizer a model is trained with."""

    optimizer: str
    lr: float

    def build(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Make the optimizer over ``model``'s parameters."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
        return torch.optim.AdamW(model.parameters(), lr=lr)


RECIPES = {
    "cnn": Recipe("sgd", 0.05),
    "resnet18": Recipe("sgd", 0.01),
    "vit": Recipe("adamw", 1e-3),
    "gpt": Recipe("adamw", 3e-3),
}


def make_config(
    *,
    dataset: str,
    model: str,
    num_workers: int | None = None,
    epochs: int,
    batch_size: int | None = None,
    lr: float | None = None,
    all_reduce: str = "native",
    backend: str = "auto",
    cluster: str | None = None,
    device: str = "auto",
    seed: int = 0,
    data_root: Path | None = None,
) -> TrainConfig:
    """Fill in the options left open: workers, batch size that they can share, learning rate.

    Raises:
        ConfigError: the batch cannot be shared equally, or torchrun started another number.
    """
    workers = _workers(num_workers)
    if batch_size is None:
        batch_size = -(-DEFAULT_BATCH_SIZE // workers) * workers
    if batch_size % workers:
        below = batch_size // workers * workers
        nearest = f"{below} or {below + workers}" if below else str(workers)
        raise ConfigError(
            f"--batch_size {batch_size} cannot be shared equally by {workers} workers: "
            f"use {nearest}"
        )
    return TrainConfig(
        dataset=dataset,
        model=model,
        num_workers=workers,
        epochs=epochs,
        batch_size=batch_size,
        lr=RECIPES[model].lr if lr is None else lr,
        all_reduce=all_reduce,
        backend=backend,
        cluster=cluster,
        device=device,
        seed=seed,
        data_root=data_root,
    )


def _workers(asked: int | None) -> int:
    if not started_by_torchrun():
        return asked or DEFAULT_WORKERS
    world_size = int(os.environ["WORLD_SIZE"])
    if asked not in (None, world_size):
        raise ConfigError(
            f"torchrun started {world_size} workers and --num_workers asks for {asked}: "
            "leave --num_workers out under torchrun"
        )
    return world_size


def train(config: TrainConfig) -> list[EpochResult]:
    """Train on ``config.num_workers`` ranks; return rank 0's history.

    Raises:
        LaunchError: a rank failed.
    """
    histories = launch.run(
        train_on_rank,
        config.num_workers,
        config,
        backend=config.backend,
        cluster=config.cluster,
        device=config.device,
        timeout_s=None,
    )
    return histories[0]


def train_on_rank(config: TrainConfig) -> list[EpochResult]:
    """Be one worker: load the data, build the model, fit."""
    here = launch.context()
    images = data.load(config.dataset, root=config.data_root)
    splits = data.tokens(images) if config.model == "gpt" else images
    torch.manual_seed(config.seed)
    model = models.build(
        config.model, image_shape=splits.image_shape, num_classes=splits.num_classes
    )
    dtype = getattr(torch, config.dtype)
    model.to(device=here.device, dtype=dtype)
    model.register_forward_pre_hook(lambda _, inputs: _cast(inputs, dtype))
    optimizer = RECIPES[config.model].build(model, config.lr)
    trainer = Trainer(
        model, optimizer, all_reduce=ALL_REDUCES[config.all_reduce], device=here.device
    )
    trainer.log.info(_headline(config, here.device, len(splits.train), model))
    return trainer.fit(
        splits.train,
        splits.test,
        epochs=config.epochs,
        global_batch_size=config.batch_size,
        seed=config.seed,
    )


def _cast(inputs: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Give images the model's dtype; tokens stay what they are."""
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def _headline(config: TrainConfig, device: torch.device, num_images: int, model: nn.Module) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    share = config.batch_size // config.num_workers
    where = f"simulated {config.cluster or 'switch'}" if config.backend == "sim" else device.type
    return (
        f"{config.model} ({parameters:,} parameters) on {config.dataset} ({num_images:,} images), "
        f"{where}, batch {config.batch_size} = {config.num_workers} x {share}, "
        f"{config.all_reduce} all-reduce"
    )


def report(config: TrainConfig, history: list[EpochResult]) -> None:
    """Print one closing line, from one process only."""
    if int(os.environ.get("RANK", "0")) == 0:
        if math.isnan(history[-1].train_loss):
            print("the loss is no longer a number: try a smaller --lr")
        best = max(history, key=lambda result: result.test_accuracy)
        print(
            f"test accuracy {history[-1].test_accuracy:.1%} after {config.epochs} epochs "
            f"(best {best.test_accuracy:.1%} in epoch {best.epoch})"
        )
