"""Trains an image classifier or a language model with everything that this course has built.

    distlab train --config configs/digits_cpu.yaml
    torchrun --nproc-per-node 8 -m distlab train \\
        --config configs/imagenet_resnet50.yaml --data_dir /data/imagenet

If you run the same command again, it continues where it stopped. --KEY VALUE changes any key of the
configuration, and --impl mine trains with the lessons that you have written. Exit codes:
    0 done    75 stopped and saved, run it again    78 the configuration or the data is wrong
    69 another training holds run_dir, run it again later    74 cannot save
    1 anything else: running it again may help
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distlab.data import DataError
from distlab.production.batches import Batches
from distlab.production.config import Config
from distlab.production.datasets import open_data
from distlab.production.evaluation import evaluate
from distlab.production.lessons import Lessons
from distlab.production.models import build_model
from distlab.production.optimization import ModelMean, lr_at, set_lr
from distlab.production.profile import profile
from distlab.production.program import run_program
from distlab.production.progress import Progress
from distlab.production.results import begin, conclude
from distlab.production.samples import BAD, of_predictions
from distlab.production.saving import Checkpoints
from distlab.production.states import PerRank
from distlab.production.strategies import parallelise
from distlab.production.telemetry import Telemetry, measure
from distlab.production.world import (
    alone_in,
    control_group,
    joined,
    seed_generators,
    stop_signals,
)


class Training:
    """One training run, as seen by one rank."""

    def __init__(self, config: Config, lessons: Lessons, device: torch.device) -> None:
        """Build everything that training needs, and continue from the newest checkpoint."""
        self.config, self.progress = config, Progress()

        data = open_data(config)
        self.test_samples = data.test

        model = build_model(config, data.num_classes, device)
        costs = measure(model, config, lessons)
        self.strategy = parallelise(model, config, self.loss_sum, lessons)
        self.mean = ModelMean(self.strategy.module, config.ema_decay)
        seed_generators(config.seed, self.strategy.replicas)

        make_sampler = lessons("training_state").ResumableSampler
        self.sampler = make_sampler(
            len(data.train), config.batch_size, config.seed, self.strategy.replicas
        )
        self.batches = Batches(data, self.sampler, config, device)

        self.checkpoints = Checkpoints(self.parts(), config, lessons)
        self.strategy.warm_up(self.checkpoints.unchanged)
        self.checkpoints.resume()
        make_stop = lessons("fault_tolerance").StopRequest
        self.stop = make_stop(stop_signals(), control_group())
        self.telemetry = Telemetry(
            config, lessons, self.progress, self.sampler, costs, self.strategy
        )
        if config.profile:
            batch = next(iter(self.batches.of_epoch(self.strategy)))
            folder, unchanged = config.run_dir / "trace", self.checkpoints.unchanged
            profile(lambda: self.train_step(*batch), folder, unchanged, lessons)

    def parts(self) -> dict[str, Any]:
        """Return everything that the rest of the run depends on, to be saved in checkpoints."""
        means = {
            "mean": self.strategy.of_mean(self.mean.parameters),
            "mean_of_buffers": PerRank(self.mean.buffers),
        }
        own = {"sampler": self.sampler, "progress": self.progress}
        return {**self.strategy.parts(), **(means if self.config.ema_decay else {}), **own}

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the samples' losses; a text's loss is the mean over its tokens."""
        logits, targets = of_predictions(logits, targets)
        smoothing = self.config.label_smoothing
        loss = nn.functional.cross_entropy(
            logits, targets, reduction="sum", ignore_index=BAD, label_smoothing=smoothing
        )
        return loss / self.config.predictions_per_sample

    def run(self) -> None:
        """Train to the end, or until asked to stop, and save."""
        with self.telemetry, self.stop, self.batches:
            begin(self.config, self.progress)
            try:
                self.train_epochs()
            except StopAsked:
                self.telemetry.reports.say(
                    f"asked to stop: saves step {self.progress.step}; start the same command again"
                )
                self.stop.leave(self.finish)
            self.finish()

    def train_epochs(self) -> None:
        """Train and evaluate the rest of the run, epoch by epoch."""
        while self.progress.evaluated < self.config.epochs:
            if self.progress.evaluated < self.sampler.epoch:
                self.evaluate()
            else:
                self.train_epoch()

    def train_epoch(self) -> None:
        """Train on the rest of the epoch."""
        batches = self.batches.of_epoch(self.strategy)
        for inputs, targets in self.telemetry.timer.batches(batches):
            with self.telemetry.computing():
                loss = self.train_step(inputs, targets)
            self.telemetry.end_step(loss, len(inputs), counts=self.strategy.counts)
            self.after_step()

    def train_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run one step on a global batch; the arguments are this rank's share of it."""
        strategy, sampler = self.strategy, self.sampler
        num_samples = min(sampler.global_batch, sampler.num_samples - sampler.position)
        set_lr(strategy.optimizer, lr_at(self.config, sampler))
        strategy.zero_grad()
        loss = strategy.forward_backward(inputs, targets, num_samples)
        with self.telemetry.waiting():
            strategy.average_gradients()
        strategy.step()
        self.mean.update()
        sampler.advance()
        self.progress.step += 1
        return loss

    def after_step(self) -> None:
        """Report and save when due, and stop if any rank was asked to."""
        if self.telemetry.is_due():
            lr = self.strategy.optimizer.param_groups[0]["lr"]
            bad = self.telemetry.tell(lr, self.batches.bad_images, self.checkpoints)
            self.check_images(bad)
        if self.telemetry.is_time_to_agree():
            self.stop_if_asked()
        if self.sampler.position:  # at the end of an epoch, evaluate() saves
            self.save()

    def go_on(self, place: int) -> None:
        """Show that this rank is alive, and stop all ranks if one was asked to, as in training."""
        self.telemetry.alive()
        if place % self.telemetry.steps_per_agreement == 0:
            self.stop_if_asked()

    def stop_if_asked(self) -> None:
        """Stop all ranks if any of them was asked to stop."""
        if self.stop.agreed():
            raise StopAsked

    def save(self) -> None:
        """Save if the step is a multiple of ``save_every``."""
        if self.progress.step % self.config.save_every == 0:
            with self.telemetry.watch.busy():  # a slow disk may still write the last one
                self.checkpoints.save(self.progress.step)

    def finish(self) -> None:
        """Save, and wait until the checkpoint is durable."""
        with self.telemetry.watch.busy():
            self.checkpoints.finish(self.progress.step)

    def check_images(self, bad: int) -> None:
        """Save and stop, on all ranks, if more images are unreadable than allowed."""
        allowed = self.config.max_bad_images
        if bad > allowed:
            self.finish()
            raise DataError(
                f"{bad} images of this epoch cannot be read, named above, and max_bad_images is "
                f"{allowed}: replace them, or allow so many. Step {self.progress.step} is saved."
            )

    def evaluate(self) -> None:
        """Evaluate after an epoch, counting each test sample exactly once."""
        result = evaluate(self.strategy, self.test_samples, self.config, self.mean, self.go_on)
        self.progress.note(self.sampler.epoch, result)
        self.telemetry.tell_evaluation(result, len(self.test_samples))
        self.save()


class StopAsked(Exception):
    """A rank was asked to stop; all ranks stop after the same step or batch."""


def train(config: Config, lessons: Lessons) -> None:
    """Train according to a configuration, from the newest checkpoint if there is one."""
    with joined(config) as device, alone_in(config.run_dir):
        training = Training(config, lessons, device)
        training.run()
        texts = training.test_samples
        conclude(config, training.progress, training.strategy, training.mean, texts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says, and return the exit code."""
    return run_program(train, __doc__ or "", arguments)


if __name__ == "__main__":
    sys.exit(main())
