"""Exact evaluation: all ranks use the same model, and each test sample counts once."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from distlab.production.batches import on_device
from distlab.production.config import Config
from distlab.production.jpegs import decoded
from distlab.production.loading import evaluation_keys, loader_of
from distlab.production.optimization import ModelMean
from distlab.production.samples import BAD, blank, of_predictions
from distlab.production.states import average_buffers
from distlab.production.strategies import Strategy

LARGEST_LOSS = 700.0  # the exponential of 710 is too large for a float


class Evaluation(NamedTuple):
    """How well a model predicts the test set: the class of each image, or each next token."""

    accuracy: float  # fraction of right predictions
    top5_accuracy: float  # fraction of predictions with the right class among the five likeliest
    loss: float = math.nan  # mean cross-entropy of the predictions

    @property
    def perplexity(self) -> float:
        """Number of equally likely tokens among which the model is as undecided as here."""
        return math.exp(self.loss) if self.loss < LARGEST_LOSS else math.inf


@torch.no_grad()
def evaluate(
    strategy: Strategy,
    samples: Any,
    config: Config,
    mean: ModelMean,
    alive: Callable[[int], object],
) -> Evaluation:
    """Return how well the model predicts all samples; the same on all ranks.

    The training state does not change.

    Args:
        mean: Moving average of the parameters; if there is one, it is evaluated in their place.
        alive: Callback for each batch, on all ranks, which gets the number of batches before it; it
            may raise to stop the evaluation.

    Raises:
        RuntimeError: Not every sample was counted exactly once, because a sampler pads, say.
    """
    group = strategy.replicas
    keys = evaluation_keys(
        len(samples), config.batch_size, max(dist.get_rank(group), 0), strategy.num_replicas
    )
    sums = torch.zeros(5, dtype=torch.float64, device=strategy.device)
    with as_one_model(strategy, mean):
        # Its processes end with it: forking one takes 0.1 s, and in between they would hold memory.
        loader = loader_of(samples, keys, config, strategy.device)
        for place, batch in enumerate(decoded(loader, strategy.device)):
            parts = (part.tensor_split(config.accumulate) for part in batch)  # as in training
            for inputs, targets in zip(*parts, strict=True) if strategy.computes else ():
                sums += _sums(strategy, inputs, targets, config)
            alive(place)
    if not strategy.counts:
        sums.zero_()
    dist.all_reduce(sums)
    num_right, num_among_five, num_seen, num_bad, loss_sum = sums.tolist()
    expected = len(samples) * config.predictions_per_sample
    if num_seen != expected:
        raise RuntimeError(f"{num_seen:.0f} of {expected} predictions were evaluated")
    loss = loss_sum / max(num_seen - num_bad, 1)
    return Evaluation(num_right / num_seen, num_among_five / num_seen, loss)


def _sums(strategy: Strategy, inputs: Tensor, targets: Tensor, config: Config) -> Tensor:
    """Return this rank's predictions: right, right among five, all, without target; and the loss.

    They stay on the device, so that the next batch need not wait for this one.
    """
    inputs = inputs if len(inputs) else blank(config, 1)[0]
    with strategy.autocast():
        logits = strategy.predict(on_device(inputs, config, strategy.device))
    if logits is None:
        return torch.zeros(5, dtype=torch.float64, device=strategy.device)
    targets = targets.to(strategy.device, non_blocking=True)
    logits, targets = of_predictions(logits[: len(targets)], targets)
    is_right = logits.topk(min(5, logits.shape[1])).indices == targets[:, None]
    is_bad = targets == BAD
    loss = cross_entropy(logits, targets, reduction="sum", ignore_index=BAD)
    counts = [is_right[:, 0].sum(), is_right.sum(), torch.ones_like(is_bad).sum(), is_bad.sum()]
    return torch.stack([*(count.double() for count in counts), loss.double()])


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
