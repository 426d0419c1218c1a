"""Predict how a recipe trains on a cluster that you do not have, by simulating a step.

    distlab train --config configs/imagenet_resnet50.yaml --dry-run --cluster dgx-a100 --nodes 4

--cluster names a preset of the simulator; all GPUs of the --nodes take part. No data is needed;
imagefolder means ImageNet.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from distlab.production.config import Config
from distlab.production.datasets import open_data
from distlab.production.errors import ConfigError
from distlab.production.images import side_of
from distlab.production.simulated_step import Step, simulated_step
from distlab.sim import GPU, Cluster, SimulationError
from distlab.util.text import bytes_text, counted, seconds_text

CLUSTER = "dgx-a100"  # by default
EFFICIENCY = 0.61  # fitted fraction of the roofline, see ASSUMED
ASSUMED = """\
Assumed: GPUs reach {:.0%} of the roofline of their data sheets, which is fitted to one figure,
NVIDIA's 2,470 images/s of ResNet-50 on an A100 of 80 GB in 16 bits (DeepLearningExamples, ConvNets,
resnet50v1.5). Loading images, checkpoints, torch.compile, mixup, and starts and memory of libraries
are left out; sharding_strategy auto stays at the stage that is written. This is a prediction: it
was not run."""


class Counts(NamedTuple):
    """Numbers of samples and classes in a dataset."""

    train: int
    test: int
    classes: int


COUNTS = {
    "imagefolder": Counts(1_281_167, 50_000, 1000),  # ImageNet
    "mnist": Counts(60_000, 10_000, 10),
    "cifar10": Counts(50_000, 10_000, 10),
    "digits": Counts(1_437, 360, 10),
    "synthetic": Counts(2_048, 512, 10),
}


@dataclass(frozen=True)
class Prediction:
    """Predicted speed and duration of a recipe.

    Attributes:
        step: Simulated step at the image size of most epochs.
        predictions_per_s: Images or tokens per second of all GPUs together in such a step.
        mfu: Model FLOPs utilisation of such a step.
        training_s, evaluation_s: Total seconds over all epochs.
    """

    step: Step
    predictions_per_s: float
    mfu: float
    training_s: float
    evaluation_s: float

    @property
    def hours(self) -> float:
        """Duration of the whole recipe, in hours."""
        return (self.training_s + self.evaluation_s) / 3600


def predict(config: Config, cluster: Cluster) -> Prediction:
    """Predict a run, by simulating two steps and an evaluation for each training image size.

    Raises:
        ConfigError: The cluster has no GPUs, or the recipe does not fit into their memory or
            uses a feature that cannot be predicted.
        NotThereError: This copy of the course has no solutions.

    Cost: 3 s, and about 0.5 s for each GPU of the cluster and each image size.
    """
    gpu = cluster.gpu
    if gpu is None:
        raise ConfigError(f"{cluster.name} has no GPUs to train on: choose one that has: dgx-a100")
    counts, slower = _counts(config), replace(cluster, gpu=_slower(gpu))
    epochs = Counter(side_of(config, epoch) for epoch in range(config.epochs))
    try:
        steps = {side: simulated_step(config, slower, side, counts.classes) for side in epochs}
    except SimulationError as error:
        raise ConfigError(f"it cannot train so: {error}") from None
    step = steps[max(epochs, key=epochs.__getitem__)]
    num_steps = math.ceil(counts.train / config.batch_size)
    training_s = sum(epochs[side] * num_steps * steps[side].step_s for side in epochs)
    num_batches = math.ceil(counts.test / config.batch_size)
    return Prediction(
        step,
        config.batch_size * config.predictions_per_sample / step.step_s,
        _mfu(config, step, gpu, cluster.num_gpus),
        training_s,
        config.epochs * num_batches * step.evaluation_s,
    )


def _counts(config: Config) -> Counts:
    """Return the numbers of a dataset; only texts are opened for it."""
    if not config.is_language:
        return COUNTS[config.data]
    data = open_data(config)
    return Counts(len(data.train), len(data.test), data.num_classes)


def _slower(gpu: GPU) -> GPU:
    """Return a GPU that reaches ``EFFICIENCY`` of its data-sheet rates."""
    flops = {dtype: EFFICIENCY * rate for dtype, rate in gpu.achievable_flops.items()}
    rate = EFFICIENCY * gpu.memory_bytes_per_s
    return replace(gpu, achievable_flops=flops, memory_bytes_per_s=rate)


def _mfu(config: Config, step: Step, gpu: GPU, num_gpus: int) -> float:
    peak = gpu.peak_flops["float16" if config.is_half else "float32"]
    flops = 3 * step.forward_flops * config.batch_size  # the backward pass counts twice
    return flops / (step.step_s * peak * num_gpus)


# Printing


def print_prediction(config: Config, num_nodes: int) -> None:
    """Print the prediction for a cluster's preset as one short table, and its assumptions.

    Raises:
        ConfigError: As for ``predict``; or there is no such cluster.
    """
    try:
        cluster = Cluster.preset(config.cluster or CLUSTER, num_nodes)
    except ValueError as error:
        raise ConfigError(f"cluster: {error}") from None
    prediction = predict(config, cluster)
    kind = "texts" if config.is_language else "images"
    ways = f"{config.model}, {config.precision}, batches of {config.batch_size:,} {kind}"
    table = Table.grid(padding=(0, 2))
    for row in _rows(config, cluster.num_gpus, prediction):
        table.add_row(*row)
    console = Console(highlight=False)
    where = f"{counted(cluster.num_gpus, 'GPU')} of {cluster.name}"
    console.print(f"{where}: {ways}\n", soft_wrap=True)
    console.print(table)
    print(f"\n{ASSUMED.format(EFFICIENCY)}")


def _rows(config: Config, gpus: int, prediction: Prediction) -> list[tuple[str, str, str]]:
    """Return rows, each with a quantity, its value and a remark."""
    step = prediction.step
    held = sorted(step.peak_by_category.items(), key=lambda item: -item[1])
    parts = ", ".join(
        f"{category.replace('_', ' ')} {bytes_text(size)}" for category, size in held if size
    )
    waiting = f"{step.exposed_s / step.step_s:.1%} of it"
    epoch_s = prediction.training_s / config.epochs
    epoch = f"{epoch_s / 60:.1f} min" if epoch_s >= 60 else seconds_text(epoch_s)
    return [
        ("step", seconds_text(step.step_s), f"strategy {step.strategy}"),
        ("  computing", seconds_text(step.step_s - step.exposed_s), ""),
        ("  waiting for the network", seconds_text(step.exposed_s), waiting),
        (
            f"{config.unit}/s",
            f"{prediction.predictions_per_s:,.0f}",
            f"{prediction.predictions_per_s / gpus:,.0f} a GPU",
        ),
        ("MFU", f"{prediction.mfu:.1%}", ""),
        ("memory of a GPU", bytes_text(step.peak_bytes), parts),
        ("an epoch", epoch, "of training, on average"),
        (
            "the recipe",
            f"{prediction.hours:.2f} h",
            f"{config.epochs} epochs and their evaluations",
        ),
    ]
