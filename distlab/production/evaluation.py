"""Exact evaluation: all ranks use the same model, and each test image counts once."""

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
    """Fraction of the test images that a model gets right."""

    top1: float
    top5: float  # fraction of images whose class is among the five likeliest


@torch.no_grad()
def evaluate(
    strategy: Strategy,
    images: Images,
    config: Config,
    mean: ModelMean,
    alive: Callable[[int], object],
) -> Accuracy:
    """Return the fraction of all images that the model gets right; the same on all ranks.

    The training state does not change.

    Args:
        mean: Moving average of the parameters; if there is one, it is evaluated in their place.
        alive: Callback for each batch, on all ranks, which gets the number of batches before it; it
            may raise to stop the evaluation.

    Raises:
        RuntimeError: Not every image was counted exactly once, for example because a sampler pads.
    """
    group = strategy.replicas
    keys = evaluation_keys(
        len(images), config.batch_size, max(dist.get_rank(group), 0), strategy.num_replicas
    )
    counts = torch.zeros(3, dtype=torch.int64, device=strategy.device)
    with as_one_model(strategy, mean):
        for place, (batch, labels) in enumerate(loader_of(images, keys, config, strategy.device)):
            if strategy.computes:
                counts += _count(strategy, batch, labels, config)
            alive(place)
    if not strategy.counts:
        counts.zero_()
    dist.all_reduce(counts)
    num_top1, num_top5, num_seen = counts.tolist()
    if num_seen != len(images):
        raise RuntimeError(f"{num_seen} of {len(images)} test images were evaluated")
    return Accuracy(num_top1 / num_seen, num_top5 / num_seen)


def _count(strategy: Strategy, batch: Tensor, labels: Tensor, config: Config) -> Tensor:
    """Return the numbers of this rank's images: right, right among the top five, and in total.

    They stay on the device, so that the next batch need not wait for this one.
    """
    inputs = batch if len(batch) else batch.new_zeros(1, *batch.shape[1:])
    with strategy.autocast():
        logits = strategy.predict(on_device(inputs, config, strategy.device))
    likeliest = logits.topk(min(5, logits.shape[1])).indices[: len(labels)]
    is_right = likeliest == labels.to(strategy.device, non_blocking=True)[:, None]
    is_first = is_right[:, 0]
    return torch.stack([is_first.sum(), is_right.sum(), torch.ones_like(is_first).sum()])


@contextmanager
def as_one_model(strategy: Strategy, mean: ModelMean) -> Iterator[None]:
    """Within the block, give all replicas the same model, averaged over steps and replicas."""
    module = strategy.module
    with mean.in_place():
        saved = {name: value.clone() for name, value in module.named_buffers()}
        average_buffers(module, strategy.replicas)
        module.eval()
        try:
            yield
        finally:
            module.train()
            for name, value in module.named_buffers():
                value.copy_(saved[name])
