"""Exact evaluation: one model on all ranks, and each test image counts once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.production.batches import on_device
from distlab.production.config import Config
from distlab.production.images import Images, evaluation_keys, loader_of
from distlab.production.optimization import ModelMean
from distlab.production.states import average_buffers
from distlab.production.strategies import Strategy


@torch.no_grad()
def evaluate(
    strategy: Strategy,
    images: Images,
    config: Config,
    mean: ModelMean,
    alive: Callable[[], object],
) -> float:
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
    counts = torch.zeros(2, dtype=torch.int64, device=strategy.device)
    with as_one_model(strategy, mean):
        for batch, labels in loader_of(images, keys, config, strategy.device):
            if strategy.computes:
                counts += _count(strategy, batch, labels, config)
            alive()
    if not strategy.counts:
        counts.zero_()
    dist.all_reduce(counts)
    num_right, num_seen = counts.tolist()
    if num_seen != len(images):
        raise RuntimeError(f"{num_seen} of {len(images)} test images were evaluated")
    return float(num_right / num_seen)


def _count(strategy: Strategy, batch: Tensor, labels: Tensor, config: Config) -> Tensor:
    """Count which of this rank's images are right, and how many there are; perhaps none."""
    shown = batch if len(batch) else batch.new_zeros(1, *batch.shape[1:])
    with strategy.autocast():
        logits = strategy.predict(on_device(shown, config, strategy.device))
    found = logits.argmax(1)[: len(labels)].cpu()
    right = [int((found == labels).sum()), len(labels)]
    return torch.tensor(right, device=strategy.device)


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
