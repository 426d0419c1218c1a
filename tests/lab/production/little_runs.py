"""Training runs on a handful of samples, by the trainer in a world of ranks and a plain loop."""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from picture_folders import quick
from torch import Tensor, nn

from distlab import launch
from distlab.production.batches import on_device
from distlab.production.config import Config
from distlab.production.datasets import Data
from distlab.production.images import MEAN, STD, Images, Pixels
from distlab.production.language import Texts
from distlab.production.lessons import find_lessons
from distlab.production.models import build_model
from solutions.phase4_production import imagenet_trainer
from solutions.phase4_production.imagenet_trainer import Training

CPU = torch.device("cpu")
NUM_TRAIN, NUM_TEST, NUM_CLASSES = 21, 7, 4  # training batches: 8, 8 and 5; test batch: 7
NUM_TOKENS = 11  # different ones
Case = dict[str, Any]
Outcome = dict[str, Any]
GPT: Case = {
    "model": "gpt",
    "data": "text",
    "sequence_length": 6,
    "layers": 3,
    "width": 16,
    "heads": 4,
}


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


def little_data(config: Config) -> Data:
    """Return noise, the same in every process."""
    if config.is_language:
        random, length = np.random.default_rng(11), config.sequence_length
        shards = [random.integers(NUM_TOKENS, size=n * length + 1) for n in (NUM_TRAIN, NUM_TEST)]
        texts = [Texts([shard], config, NUM_TOKENS) for shard in shards]
        return Data(*texts, NUM_TOKENS)
    generator = torch.Generator().manual_seed(11)
    halves = [
        Pixels(
            torch.randint(256, (number, 3, 8, 8), generator=generator, dtype=torch.uint8),
            torch.randint(NUM_CLASSES, (number,), generator=generator),
        )
        for number in (NUM_TRAIN, NUM_TEST)
    ]
    train, test = (Images(half, config, is_training=not k) for k, half in enumerate(halves))
    return Data(train, test, NUM_CLASSES)


def started(config: Config) -> Training:
    """Return a ``Training`` on the samples of ``little_data``, in the current world."""
    with mock.patch.object(imagenet_trainer, "open_data", little_data):
        return Training(config, find_lessons("solution", config), CPU)


def logits_of(training: Training) -> Any:
    """Return the logits of the test samples, if this rank has them; called on all ranks."""
    inputs = torch.stack([training.test_samples[0, k][0] for k in range(NUM_TEST)])
    training.strategy.module.eval()
    with torch.no_grad():
        logits = training.strategy.predict(on_device(inputs, training.config, CPU))
    return None if logits is None else logits.flatten(1).tolist()


def losses_in(run_dir: Path) -> list[float]:
    """Return the mean loss of each epoch, as rank 0 recorded it."""
    lines = (run_dir / "metrics.rank0.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def on_each_rank(run_dir: Path, cases: Sequence[Case]) -> list[Outcome]:
    """Run the training of each case in this world, one after another, in float64."""
    exact = [{**case, "precision": "fp64"} for case in cases]
    return [_outcome(run_dir / f"{place}", case) for place, case in enumerate(exact)]


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
        "accuracy": [(epoch, *result) for epoch, result in training.progress.history],
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


def in_world(call: Any, size: int, *args: object, backend: str = "gloo") -> list[Any]:
    """Call a function in a world of ranks, with enough time to import torchvision first."""
    return launch.run(call, size, *args, backend=backend, timeout_s=900)


# --- by a plain loop -----------------------------------------------------------------------------


def plain(run_dir: Path, **changes: Any) -> Outcome:
    """Run the same training in plain torch: one process, whole batches, float64."""
    config = little(run_dir, precision="fp64", **changes)
    data = little_data(config)
    model = build_model(config, data.num_classes, CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=config.momentum)
    means = [p.detach().clone() for p in model.parameters()]
    x, y = _all(data.train)
    losses, step = [], 0
    for epoch in range(config.epochs):
        order = torch.randperm(NUM_TRAIN, generator=torch.Generator().manual_seed(epoch))
        total = 0.0
        for part in order.split(config.batch_size):
            rate = [1 / 3, 2 / 3, 1.0, 1.0, 0.75, 0.25][step]  # warm-up, then a cosine
            optimizer.param_groups[0]["lr"] = config.lr * rate
            optimizer.zero_grad()
            loss = _loss(model(x[part]), y[part])
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
    x, y = _all(data.test)
    logits = model.eval()(x).detach()
    is_right = logits.argsort(-1, descending=True)[..., :5] == y[..., None]
    results = is_right[..., 0].double().mean(), is_right.any(-1).double().mean(), _loss(logits, y)
    return {
        "losses": losses,
        "logits": logits.flatten(1).tolist(),
        "results": [float(result) for result in results],
    }


def _all(samples: Any) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of all samples."""
    if isinstance(samples, Texts):
        tokens = torch.tensor(samples.shards[0])
        return tokens[:-1].view(-1, samples.length), tokens[1:].view(-1, samples.length)
    mean, std = torch.tensor([MEAN, STD], dtype=torch.float64).view(2, 3, 1, 1)
    return (samples.source.pixels.double() / 255 - mean) / std, samples.source.labels


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
