"""Exact evaluation: one model on all ranks, and each test image counts once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.production.batches import on_device
from distlab.production.config import Config
from distlab.production.images import Images
from distlab.production.loading import evaluation_keys, loader_of
from distlab.production.optimization import ModelMean
from distlab.production.states import average_buffers
from distlab.production.strategies import Strategy


class Accuracy(NamedTuple):
    """Which part of the test images a model gets right."""

    top1: float
    top5: float  # the class is among the five likeliest


@torch.no_grad()
def evaluate(
    strategy: Strategy,
    images: Images,
    config: Config,
    mean: ModelMean,
    alive: Callable[[], object],
) -> Accuracy:
    """Return the share of all images that the model gets right; the same on all ranks.

    Nothing of the training changes.

    Args:
        mean: over the steps, which is evaluated in place of the newest parameters.
        alive: called for each batch, on all ranks; it may raise, to stop.

    Raises:
        RuntimeError: other than all images were counted: the padding of a sampler would do that.
    """
    group = strategy.replicas
    keys = evaluation_keys(
        len(images), config.batch_size, max(dist.get_rank(group), 0), strategy.num_replicas
    )
    counts = torch.zeros(3, dtype=torch.int64, device=strategy.device)
    with as_one_model(strategy, mean):
        for batch, labels in loader_of(images, keys, config, strategy.device):
            if strategy.computes:
                counts += _count(strategy, batch, labels, config)
            alive()
    if not strategy.counts:
        counts.zero_()
    dist.all_reduce(counts)
    num_top1, num_top5, num_seen = counts.tolist()
    if num_seen != len(images):
        raise RuntimeError(f"{num_seen} of {len(images)} test images were evaluated")
    return Accuracy(num_top1 / num_seen, num_top5 / num_seen)


def _count(strategy: Strategy, batch: Tensor, labels: Tensor, config: Config) -> Tensor:
    """Count this rank's images that are right, right among five, and all; perhaps none."""
    shown = batch if len(batch) else batch.new_zeros(1, *batch.shape[1:])
    with strategy.autocast():
        logits = strategy.predict(on_device(shown, config, strategy.device))
    likeliest = logits.topk(min(5, logits.shape[1])).indices[: len(labels)].cpu()
    is_right = likeliest == labels[:, None]
    counts = [int(is_right[:, 0].sum()), int(is_right.sum()), len(labels)]
    return torch.tensor(counts, device=strategy.device)


@contextmanager
def as_one_model(strategy: Strategy, mean: ModelMean) -> Iterator[None]:
    """Let all replicas hold the same model meanwhile: the means over steps, and over replicas."""
    module = strategy.module
    with mean.in_place():
        own = {name: value.clone() for name, value in module.named_buffers()}
        average_buffers(module, strategy.replicas)
        module.eval()
        try:
            yield
        finally:
            module.train()
            for name, value in module.named_buffers():
                value.copy_(own[name])
