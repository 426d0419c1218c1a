"""What a training tells about itself: whether it lives, how fast it is, and how well it goes."""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distlab.production.config import Config
from distlab.production.lessons import Lessons
from distlab.production.progress import Interval, Progress
from distlab.production.reports import LOG_EVERY, Reports, peak_flops_per_s
from distlab.production.saving import Checkpoints
from distlab.production.strategies.base import DTYPES
from distlab.production.watch import Watch

STRAGGLERS_OVER = 50  # steps


class Costs(NamedTuple):
    """What MFU is made of, on this rank's device."""

    device: torch.device
    flops_per_image: float  # that the model needs: forward, and twice as many backward
    peak_flops_per_s: float  # that the device could do


def measure(model: nn.Module, config: Config, lessons: Lessons) -> Costs:
    """Count the FLOPs of a model, and find the peak of the device that it is on."""
    device, side = next(model.parameters()).device, config.image_size
    image = torch.zeros(1, 3, side, side, device=device)
    model.eval()
    with torch.no_grad():
        forward = lessons("monitoring", "phase4_production").count_flops(lambda: model(image))
    model.train()
    return Costs(device, 3.0 * forward, peak_flops_per_s(device, DTYPES[config.precision]))


class Telemetry:
    """The lessons of Phase 4 that watch a training: 4.5, and 4.14 to 4.17."""

    def __init__(
        self,
        config: Config,
        lessons: Lessons,
        progress: Progress,
        num_steps: int,
        costs: "Costs",
    ) -> None:
        self.monitoring = lessons("monitoring", "phase4_production")
        self.config, self.progress = config, progress
        self.reports = Reports(config, lessons, num_steps, progress.step)
        self.watch = Watch(config, lessons)
        self.timer = self.monitoring.StepTimer()
        self.stragglers = self.monitoring.StragglerDetector(window=STRAGGLERS_OVER)
        self.interval = Interval(costs.device)
        self.costs = costs
        self.steps_per_epoch = num_steps // config.epochs

    def __enter__(self) -> "Telemetry":
        return self

    def __exit__(self, *error: object) -> None:
        self.watch.close()
        self.reports.close()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Count the time inside for a part of the step."""
        counted: AbstractContextManager[None] = self.timer.part(name)
        return counted

    def alive(self) -> None:
        """Show that this rank lives, where a step takes long."""
        self.watch.beat(self.progress.step)

    def end_step(self, loss_sum: Tensor, num_images: int, *, counts: bool) -> None:
        """Take a step in.

        Args:
            loss_sum: of this rank's images.
            num_images: of this rank.
            counts: whether they count: not where another rank of the replica has the same.
        """
        times = self.timer.end_step()
        self.interval.times.append(times)
        if counts:
            self.interval.add(loss_sum, num_images)
        self.watch.beat(self.progress.step, times.data_s + times.compute_s)
        for slow in self.stragglers.add(times):
            text = f"rank {slow.rank} is slow: {slow.ratio:.1f} times as long, by its {slow.part}"
            self.reports.say(text)
            self.reports.write({"straggler_ratio": slow.ratio}, self.progress.step)

    def is_due(self) -> bool:
        """Whether it is time to tell; the same on all ranks."""
        step = self.progress.step
        return step % LOG_EVERY == 0 or step % self.steps_per_epoch == 0

    def tell(self, lr: float, bad_images: int, checkpoints: Checkpoints) -> None:
        """Write the means over the steps since the last time; all ranks call it."""
        step, interval, device = self.progress.step, self.interval, self.costs.device
        seconds = interval.seconds()
        found = {
            "loss": interval.mean_loss(),
            "lr": lr,
            "epoch": step / self.steps_per_epoch,
            "samples_total": step * self.config.batch_size,
            **self._speed(seconds["step_s"]),
            **seconds,
            "peak_memory_bytes": self.monitoring.peak_memory_bytes(device),
            "bad_images_total": bad_images,
            "checkpoint_s": checkpoints.last_s,
            "failed_saves_total": checkpoints.failed_saves,
        }
        self.reports.write(found, step)
        self.reports.show(step, _line(found))
        self.interval = Interval(self.costs.device)

    def _speed(self, step_s: float) -> dict[str, float]:
        """Return the speed of all ranks together."""
        interval, num_steps = self.interval, max(len(self.interval.times), 1)
        images_per_s = self.monitoring.throughput(interval.num_own, step_s * num_steps)
        flops = self.costs.flops_per_image * interval.num_own / num_steps
        mfu = self.monitoring.mfu(flops, step_s, self.costs.peak_flops_per_s)
        return {"images_per_s": images_per_s, "mfu": mfu}


def _line(found: dict[str, float]) -> str:
    return (
        f"epoch {found['epoch']:.2f}  loss {found['loss']:.3f}  "
        f"{found['images_per_s']:,.0f} images/s  MFU {found['mfu']:.1%}"
    )
