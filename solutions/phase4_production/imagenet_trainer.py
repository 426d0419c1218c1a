"""Trains an image classifier with everything that this course has built.

    python -m solutions.phase4_production.imagenet_trainer --config configs/digits_cpu.yaml
    torchrun --nproc-per-node 2 -m solutions.phase4_production.imagenet_trainer \\
        --config configs/imagenet_resnet50.yaml --data_dir /data/imagenet

The same command goes on where the last one has stopped. --KEY VALUE changes any key of the
configuration, and --impl mine trains with the lessons that you have written. Exit codes:
    0 done    75 stopped and saved, run it again    78 the configuration or the data is wrong
    74 cannot save    1 anything else: running it again may help
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from distlab.data import DataError
from distlab.production.batches import Batches
from distlab.production.config import Config
from distlab.production.evaluation import evaluate
from distlab.production.images import BAD, open_images
from distlab.production.lessons import Lessons
from distlab.production.models import build_model
from distlab.production.optimization import ParameterMean, peak_lr, set_lr, share_of_lr
from distlab.production.program import run_program
from distlab.production.progress import Progress
from distlab.production.results import conclude, write_config
from distlab.production.saving import Checkpoints
from distlab.production.strategies import parallelise
from distlab.production.telemetry import Telemetry, measure
from distlab.production.world import alone_in, joined, seed_generators

PHASE = "phase4_production"


class Training:
    """One run, as one rank sees it."""

    def __init__(self, config: Config, lessons: Lessons, device: torch.device) -> None:
        """Make all that is trained, and go on from the newest checkpoint."""
        self.config = config
        data = open_images(config)
        model = build_model(config, data.num_classes, device)
        self.measured = measure(model, config, lessons)
        self.strategy = parallelise(model, config, self.loss_sum, lessons)
        self.mean = ParameterMean.of(self.strategy.module, config.ema_decay)
        seed_generators(config.seed, self.strategy.replicas)
        self.sampler = lessons("training_state", PHASE).ResumableSampler(
            len(data.train), config.batch_size, config.seed, self.strategy.replicas
        )
        self.steps_per_epoch, self.num_samples = len(self.sampler), len(data.train)
        self.batches = Batches(data, self.sampler, config, device)
        self.test_images, self.progress = data.test, Progress()

        self.checkpoints = Checkpoints(self.parts(), config, lessons)
        self.strategy.warm_up(config.image_size, self.checkpoints.unchanged)
        self.progress.step = self.checkpoints.resume()
        num_steps = config.epochs * self.steps_per_epoch
        self.telemetry = Telemetry(config, lessons, self.progress, num_steps, self.measured)
        self.stop = lessons("fault_tolerance", PHASE).StopRequest()

    def parts(self) -> dict[str, Any]:
        """Return all that decides how the run goes on: what a checkpoint holds."""
        mean = {"mean": self.strategy.of_parameters(self.mean)} if self.mean else {}
        own = {"sampler": self.sampler, "progress": self.progress}
        return {**self.strategy.parts(), **mean, **own}

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of some images; those with the label BAD do not count."""
        smoothing = self.config.label_smoothing
        return nn.functional.cross_entropy(
            logits.float(), targets, reduction="sum", ignore_index=BAD, label_smoothing=smoothing
        )

    def run(self) -> None:
        """Train and evaluate, epoch by epoch, to the end."""
        with self.telemetry, self.stop:
            while True:
                if self.progress.evaluated < self.sampler.epoch:
                    self.evaluate()
                if self.sampler.epoch == self.config.epochs:
                    break
                self.train_epoch()
            self.checkpoints.finish(self.progress.step)

    def train_epoch(self) -> None:
        """Train on what is left of the epoch."""
        self.strategy.module.train()
        batches = self.batches.of_epoch(self.strategy)
        for images, targets in self.telemetry.timer.batches(batches):
            with self.telemetry.part("compute"):
                loss = self.train_step(images, targets)
            self.telemetry.end_step(loss, len(images), counts=self.strategy.counts)
            self.after_step()

    def train_step(self, images: Tensor, targets: Tensor) -> Tensor:
        """Do one step on a global batch, of which these are this rank's part."""
        strategy, config, step = self.strategy, self.config, self.progress.step
        num_samples = min(config.batch_size, self.num_samples - self.sampler.position)
        set_lr(
            strategy.optimizer, peak_lr(config) * share_of_lr(config, self.steps_per_epoch, step)
        )
        strategy.zero_grad()
        loss = strategy.forward_backward(images, targets, num_samples)
        with self.telemetry.part("communication"):
            strategy.average_gradients()
        strategy.step()
        if self.mean:
            self.mean.update()
        self.sampler.advance()
        self.progress.step += 1
        return loss

    def after_step(self) -> None:
        """Tell how it goes; save where it is time to; stop if any rank was asked to."""
        step = self.progress.step
        if self.telemetry.is_due():
            lr = self.strategy.optimizer.param_groups[0]["lr"]
            self.telemetry.tell(lr, self.batches.bad_images, self.checkpoints)
            self.check_images()
        if self.stop.agreed():
            self.telemetry.reports.say(f"asked to stop: saves after step {step}")
            self.stop.leave(lambda: self.checkpoints.finish(step))
        if step % self.config.save_every == 0:
            self.checkpoints.save(step)

    def check_images(self) -> None:
        """Save and stop, on all ranks, where more images are unreadable than may be."""
        bad, allowed = self.batches.bad_images_of_all(), self.config.max_bad_images
        if bad > allowed:
            self.checkpoints.finish(self.progress.step)
            raise DataError(
                f"{bad} images cannot be read, named above, and max_bad_images is {allowed}: "
                f"replace them, or allow so many. Step {self.progress.step} is saved."
            )

    def evaluate(self) -> None:
        """Evaluate after an epoch."""
        alive = self.telemetry.alive
        accuracy = evaluate(self.strategy, self.test_images, self.config, self.mean, alive)
        epoch = self.sampler.epoch
        self.progress.note(epoch, accuracy)
        found = {"accuracy": accuracy, "epoch": float(epoch)}
        self.telemetry.reports.write(found, self.progress.step)
        self.telemetry.reports.say(
            f"epoch {epoch} of {self.config.epochs}: {accuracy:.2%} of "
            f"{len(self.test_images):,} test images right"
        )


def train(config: Config, lessons: Lessons) -> None:
    """Train as a configuration says, from the newest checkpoint on."""
    with joined(config) as device, alone_in(config.run_dir):
        write_config(config)
        training = Training(config, lessons, device)
        training.run()
        conclude(config, training.progress)


if __name__ == "__main__":
    sys.exit(run_program(train, __doc__ or ""))
