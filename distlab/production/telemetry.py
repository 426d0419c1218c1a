"""What a training tells about itself: whether it lives, how fast it is, and how well it goes."""

import math
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distlab.production.config import Config
from distlab.production.errors import ConfigError
from distlab.production.evaluation import Accuracy
from distlab.production.lessons import Lessons
from distlab.production.progress import Interval, Progress
from distlab.production.reports import LOG_EVERY, Reports, peak_flops_per_s
from distlab.production.saving import Checkpoints
from distlab.production.strategies.base import DTYPES
from distlab.production.watch import Watch

STRAGGLERS_OVER = 50  # steps
AGREE_EVERY_S = 1.0


class Costs(NamedTuple):
    """What MFU is made of, on this rank's device."""

    device: torch.device
    flops_per_image: float  # that the model needs: forward, and twice as many backward
    peak_flops_per_s: float  # that the device could do


def measure(model: nn.Module, config: Config, lessons: Lessons) -> Costs:
    """Count the FLOPs of a model, and find the peak of the device that it is on."""
    device, side = next(model.parameters()).device, config.image_size
    image = torch.zeros(1, 3, side, side, device=device)
    model.eval()  # with gradients: without, torch's attention takes a path that is not counted
    forward = lessons("monitoring").count_flops(lambda: model(image))
    model.train()
    return Costs(device, 3.0 * forward, peak_flops_per_s(device, DTYPES[config.precision]))


class Telemetry:
    """The lessons of Phase 4 that watch a training: 4.5, and 4.14 to 4.17."""

    def __init__(
        self,
        config: Config,
        lessons: Lessons,
        progress: Progress,
        sampler: Any,
        costs: Costs,
    ) -> None:
        num_steps = progress.step + len(sampler)  # left of this epoch, and of those that follow
        num_steps += (config.epochs - sampler.epoch - 1) * steps_of_epoch(sampler)
        self.monitoring = lessons("monitoring")
        self.config, self.progress, self.sampler, self.costs = config, progress, sampler, costs
        self.reports = Reports(config, lessons, num_steps, progress.step)
        self.watch = Watch(config, lessons)
        self.timer = self.monitoring.StepTimer(synchronize=self._synchronize)
        window = STRAGGLERS_OVER // (LOG_EVERY if self.is_gpu else 1)
        self.stragglers = self.monitoring.StragglerDetector(window=window)
        self.interval = Interval(costs.device)
        self.steps_per_agreement = 1

    def __enter__(self) -> "Telemetry":
        return self

    def __exit__(self, *error: object) -> None:
        self.watch.close()
        self.reports.close()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Count the time inside for a part of the step."""
        counted: AbstractContextManager[None] = self.timer.part(name)
        return counted

    @property
    def is_gpu(self) -> bool:
        """Whether kernels run on after the call that starts them has returned."""
        return self.costs.device.type == "cuda"

    @property
    def epoch(self) -> float:
        """How many epochs have been trained."""
        sampler = self.sampler
        return float(sampler.epoch + sampler.position / sampler.num_samples)

    def _is_exact(self) -> bool:
        """Whether the parts of this step are measured: on a GPU of one in ten, for it must wait."""
        return not self.is_gpu or (self.progress.step + 1) % LOG_EVERY == 0

    def _synchronize(self) -> None:
        if self.is_gpu and self._is_exact():
            torch.cuda.synchronize(self.costs.device)

    def alive(self) -> None:
        """Show that this rank lives, where something else than a step takes long."""
        self.watch.beat(self.progress.step)

    def tell_accuracy(self, accuracy: Accuracy, num_images: int) -> None:
        """Tell the result of an evaluation, whose time counts for no step."""
        self.timer.end_step()
        epoch = self.sampler.epoch
        found = {"accuracy": accuracy.top1, "top5_accuracy": accuracy.top5, "epoch": float(epoch)}
        self.reports.write(found, self.progress.step)
        self.reports.say(
            f"epoch {epoch} of {self.config.epochs}: {accuracy.top1:.2%} of {num_images:,} test "
            f"images right, {accuracy.top5:.2%} among the five likeliest"
        )

    def end_step(self, loss_sum: Tensor, num_images: int, *, counts: bool) -> None:
        """Take a step in.

        Args:
            loss_sum: of this rank's images.
            num_images: of this rank.
            counts: whether they count: not where another rank of the replica has the same.
        """
        times = self.timer.end_step()
        is_exact = not self.is_gpu or self.progress.step % LOG_EVERY == 0
        self.interval.add_times(times, is_exact=is_exact)
        if counts:
            self.interval.add(loss_sum, num_images)
        self.watch.beat(self.progress.step, times.data_s + times.compute_s)
        for slow in self.stragglers.add(times) if is_exact else []:
            text = f"rank {slow.rank} is slow: {slow.ratio:.1f} times as long, by its {slow.part}"
            self.reports.say(text)
            self.reports.write({"straggler_ratio": slow.ratio}, self.progress.step)

    def is_due(self) -> bool:
        """Whether it is time to tell; the same on all ranks."""
        step = self.progress.step
        return step % LOG_EVERY == 0 or self.sampler.position == 0

    def is_time_to_agree(self) -> bool:
        """Whether to ask all ranks if any shall stop; the same on all ranks.

        After each step, but of short ones after as many as take a second, up to ten: a collective
        for which all ranks wait takes a millisecond on a CPU.
        """
        return self.progress.step % self.steps_per_agreement == 0

    def tell(self, lr: float, bad_images: int, checkpoints: Checkpoints) -> int:
        """Write the means over the steps since the last time; all ranks call it.

        Returns:
            How many images of this epoch cannot be read, on all ranks.
        """
        step, interval, device = self.progress.step, self.interval, self.costs.device
        seconds, of_all = interval.seconds(), interval.of_all_ranks(bad_images)
        self.steps_per_agreement = steps_in(AGREE_EVERY_S, of_all.step_s)
        found = {
            "loss": of_all.loss,
            "lr": lr,
            "epoch": self.epoch,
            "samples_total": round(self.epoch * self.sampler.num_samples),
            **self._speed(),
            **seconds,
            "peak_memory_bytes": self.monitoring.peak_memory_bytes(device),
            "bad_images_total": bad_images,
            "checkpoint_s": checkpoints.last_s,
            "failed_saves_total": checkpoints.failed_saves,
        }
        self.reports.write(found, step)
        self.reports.show(step, _line(found))
        if not math.isfinite(found["loss"]):
            lr = self.config.lr
            raise ConfigError(
                f"step {step}: the loss is {found['loss']}: try a smaller lr than {lr:g}"
            )
        self.interval = Interval(self.costs.device)
        return of_all.bad_images

    def _speed(self) -> dict[str, float]:
        """Return the speed of all ranks together."""
        interval = self.interval
        images_per_s = self.monitoring.throughput(interval.num_own, interval.all_s)
        flops = self.costs.flops_per_image * interval.num_own
        mfu = self.monitoring.mfu(flops, interval.all_s, self.costs.peak_flops_per_s)
        return {"images_per_s": images_per_s, "mfu": mfu}


def steps_in(seconds: float, step_s: float) -> int:
    """Return how many steps take so long, from 1 to LOG_EVERY: 3 of 0.3 s, in a second."""
    return LOG_EVERY if LOG_EVERY * step_s < seconds else max(int(seconds / step_s), 1)


def steps_of_epoch(sampler: Any) -> int:
    """Return how many global batches a whole epoch has."""
    return -(-int(sampler.num_samples) // int(sampler.global_batch))


def _line(found: dict[str, float]) -> str:
    return (
        f"epoch {found['epoch']:.2f}  loss {found['loss']:.3f}  "
        f"{found['images_per_s']:,.0f} images/s  MFU {found['mfu']:.1%}"
    )
