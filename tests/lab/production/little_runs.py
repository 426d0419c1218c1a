"""Training runs on a handful of images, by the trainer in a world of ranks and by a plain loop."""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from picture_folders import quick
from torch import Tensor, nn

from distlab import launch
from distlab.production.config import Config
from distlab.production.images import MEAN, STD, ImageData, Images, Pixels
from distlab.production.lessons import find_lessons
from distlab.production.models import build_model
from solutions.phase4_production import imagenet_trainer
from solutions.phase4_production.imagenet_trainer import Training

CPU = torch.device("cpu")
NUM_TRAIN, NUM_TEST, NUM_CLASSES = 21, 7, 4  # training batches: 8, 8 and 5; test batch: 7
Case = dict[str, Any]
Outcome = dict[str, Any]


def little(run_dir: Path, **changes: Any) -> Config:
    """Return a configuration whose runs have two epochs of three steps."""
    known: Case = {
        "epochs": 2,
        "batch_size": 8,
        "optimizer": "sgd",
        "lr": 0.02,
        "lr_batch_size": 8,
        "augment": "none",
        "run_dir": run_dir,
        "save_every": 100,
    }
    return quick(**{**known, **changes})


def little_data(config: Config) -> ImageData:
    """Return noise images, the same in every process."""
    generator = torch.Generator().manual_seed(11)
    halves = [
        Pixels(
            torch.randint(256, (number, 3, 8, 8), generator=generator, dtype=torch.uint8),
            torch.randint(NUM_CLASSES, (number,), generator=generator),
        )
        for number in (NUM_TRAIN, NUM_TEST)
    ]
    train, test = (Images(half, config, is_training=not k) for k, half in enumerate(halves))
    return ImageData(train, test, NUM_CLASSES)


def started(config: Config) -> Training:
    """Return a ``Training`` on the images of ``little_data``, in the current world."""
    with mock.patch.object(imagenet_trainer, "open_images", little_data):
        return Training(config, find_lessons("solution", config), CPU)


def logits_of(training: Training) -> Any:
    """Return the model's logits for the test images; all ranks must call this function."""
    shown = training.config.image_size
    images = torch.stack([training.test_images[0, k][0] for k in range(NUM_TEST)])
    assert images.shape[-1] == shown
    training.strategy.module.eval()
    with torch.no_grad():
        return training.strategy.predict(images).tolist()


def losses_in(run_dir: Path) -> list[float]:
    """Return the mean loss of each epoch, as rank 0 recorded it."""
    lines = (run_dir / "metrics.rank0.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def on_each_rank(run_dir: Path, cases: Sequence[Case]) -> list[Outcome]:
    """Run the training of each case in this world, one after another."""
    return [_outcome(run_dir / f"{place}", case) for place, case in enumerate(cases)]


def _outcome(run_dir: Path, case: Case) -> Outcome:
    only_traced = partial(torch.compile, backend="eager")  # compiling would take a minute
    with mock.patch.object(torch, "compile", only_traced):
        training = started(little(run_dir, **case))
    training.run()
    with training.mean.in_place():
        logits = logits_of(training)
    dist.barrier()
    return {
        "losses": losses_in(run_dir),
        "logits": logits,
        "accuracy": training.progress.history,
        "parts": sorted(training.parts()),
    }


def digest(state: Any) -> str:
    """Return a hash of everything that a state holds; equal states have equal hashes."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            found.update(f"{part.dtype}{tuple(part.shape)}".encode())
            found.update(part.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
        elif isinstance(part, dict):
            for key in sorted(part, key=str):
                found.update(f"{key}:".encode())
                add(part[key])
        elif isinstance(part, list | tuple):
            for each in part:
                add(each)
        else:
            found.update(repr(part).encode())

    add(state)
    return found.hexdigest()


def in_world(call: Any, size: int, *args: object) -> list[Any]:
    """Call a function in a world of ranks, with enough time to import torchvision first."""
    return launch.run(call, size, *args, backend="gloo", timeout_s=900)


# --- by a plain loop -----------------------------------------------------------------------------


def plain(run_dir: Path, **changes: Any) -> Outcome:
    """Run the same training in plain torch: one process, whole batches."""
    config = little(run_dir, **changes)
    data = little_data(config)
    model = build_model(config, NUM_CLASSES, CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=config.momentum)
    means = [p.detach().clone() for p in model.parameters()]
    x, y = (_normalised(data.train), data.train.source.labels)
    losses, step = [], 0
    for epoch in range(config.epochs):
        order = torch.randperm(NUM_TRAIN, generator=torch.Generator().manual_seed(epoch))
        total = 0.0
        for part in order.split(config.batch_size):
            rate = [1 / 3, 2 / 3, 1.0, 1.0, 0.75, 0.25][step]  # warm-up, then a cosine
            optimizer.param_groups[0]["lr"] = config.lr * rate
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[part]), y[part])
            loss.backward()
            if config.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
            for parameter in model.parameters():
                if config.decay_norms or parameter.dim() > 1:
                    parameter.grad += config.weight_decay * parameter.detach()
            optimizer.step()
            step += 1
            decay = min(config.ema_decay, (1 + step) / (10 + step))
            for mean, parameter in zip(means, model.parameters(), strict=True):
                mean.mul_(decay).add_(parameter.detach(), alpha=1 - decay)
            total += loss.item() * len(part)
        losses.append(total / NUM_TRAIN)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(means), model.parameters())
    logits = model.eval()(_normalised(data.test)).detach()
    labels = data.test.source.labels
    right = {
        "top1": float((logits.argmax(1) == labels).float().mean()),
        "top5": 1.0,  # always, because there are only four classes
    }
    return {"losses": losses, "logits": logits.tolist(), **right}


def _normalised(images: Images) -> Tensor:
    pixels: Any = images.source
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return (pixels.pixels / 255 - mean) / std
