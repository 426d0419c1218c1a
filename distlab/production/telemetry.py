"""Reports on a training run: heartbeats, speed, loss and accuracy."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import current_thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.production.config import Config
from distlab.production.errors import ConfigError
from distlab.production.evaluation import Evaluation
from distlab.production.lessons import Lessons
from distlab.production.progress import ExactSteps, Interval, Progress
from distlab.production.reports import LOG_EVERY, Reports, peak_flops_per_s
from distlab.production.samples import blank
from distlab.production.saving import Checkpoints
from distlab.production.strategies import Strategy
from distlab.production.strategies.base import DTYPES
from distlab.production.watch import watch_of

STRAGGLERS_OVER = 50  # steps
OURS = (type(threading.main_thread()), threading._DummyThread)  # the latter: autograd's
AGREE_EVERY_S = 1.0
LEAST_MFU = 0.0005  # lowest that is shown


class Costs(NamedTuple):
    """The quantities behind MFU, for this rank's device."""

    device: torch.device
    flops_per_sample: float  # of a forward pass and a backward pass, which counts twice
    peak_flops_per_s: float  # limit of the device


def measure(model: nn.Module, config: Config, lessons: Lessons) -> Costs:
    """Count the FLOPs of a model, and find the peak rate of its device."""
    device = next(model.parameters()).device
    with device:
        sample, _ = blank(config, 1)
    model.eval()  # gradients stay on: torch's attention is not counted without them
    forward = lessons("monitoring").count_flops(lambda: model(sample))
    model.train()
    return Costs(device, 3.0 * forward, peak_flops_per_s(device, DTYPES[config.precision]))


class Telemetry:
    """Watches a training run with the lessons of Phase 4: 4.5, and 4.14 to 4.17."""

    def __init__(
        self,
        config: Config,
        lessons: Lessons,
        progress: Progress,
        sampler: Any,
        costs: Costs,
        strategy: Strategy,
    ) -> None:
        num_steps = progress.step + len(sampler)  # the rest of this epoch
        num_steps += (config.epochs - sampler.epoch - 1) * steps_of_epoch(sampler)
        self.monitoring = lessons("monitoring")
        self.config, self.progress, self.sampler, self.costs = config, progress, sampler, costs
        self.reports = Reports(config, lessons, num_steps, progress.step)
        self.watch = watch_of(config, lessons, progress.step)
        every = LOG_EVERY if self.is_gpu else 1
        self.exact = ExactSteps(_wait_for(costs.device), every, progress.step + 1)
        self.timer = self.monitoring.StepTimer(synchronize=self.exact)
        window = STRAGGLERS_OVER // (LOG_EVERY if self.is_gpu else 1)
        # Only ranks with the same work are compared: workers, or the replicas of a stage.
        self.is_uneven = config.has_servers or config.parallelism.pp > 1
        self.peers = strategy.replicas if self.is_uneven else None
        self.has_peers = strategy.computes
        self.stragglers = self.monitoring.StragglerDetector(self.peers, window=window)
        self.is_waiting = self.has_waited = self.is_computing = False
        self.no_longer = ExitStack()
        strategy.waiting = self.waiting
        self.interval = Interval(costs.device)
        self.steps_per_agreement = 1

    def __enter__(self) -> "Telemetry":
        if dist.get_backend() in ("gloo", "nccl"):  # simulated ranks share one process
            self.no_longer.enter_context(self._counted_waits())
        return self

    def __exit__(self, *error: object) -> None:
        self.no_longer.close()
        self.watch.close()
        self.reports.close()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Add the time spent in the block to a part of the step."""
        counted: AbstractContextManager[None] = self.timer.part(name)
        return counted

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the block as computing, except for what waits for other ranks in it."""
        self.is_computing, self.has_waited = True, False
        with self.part("compute"):
            yield
        self.is_computing = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block, in which this rank waits for others, as communication.

        All ranks enter such blocks equally often in a step.
        """
        self.watch.beat(self.progress.step + 1)
        with self._waits():
            yield

    @contextmanager
    def _waits(self) -> Iterator[None]:
        before, self.is_waiting, self.has_waited = self.is_waiting, True, True
        with self.part("communication"):
            yield
        self.is_waiting = before

    @contextmanager
    def _counted_waits(self) -> Iterator[None]:
        """Within the block, also count waits for messages that no strategy has marked.

        The stages of a pipeline do not wait equally often, nor do servers and workers. Of them, the
        watch counts only a step's first wait.
        """
        wait = dist.Work.wait

        def counted(work: Any, *args: Any, **options: Any) -> Any:
            is_ours = isinstance(current_thread(), OURS)
            if self.is_waiting or not (self.is_computing and is_ours):
                return wait(work, *args, **options)
            with self._waits() if self.is_uneven and self.has_waited else self.waiting():
                return wait(work, *args, **options)

        dist.Work.wait = counted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            dist.Work.wait = wait  # type: ignore[method-assign]

    @property
    def is_gpu(self) -> bool:
        """True on a GPU, whose kernels may still run after the call that starts them returns."""
        return self.costs.device.type == "cuda"

    @property
    def epoch(self) -> float:
        """Number of epochs that have been trained."""
        sampler = self.sampler
        return float(sampler.epoch + sampler.position / sampler.num_samples)

    def alive(self) -> None:
        """Report that this rank is alive; to be called during long work outside the steps."""
        self.watch.beat(self.progress.step)

    def tell_evaluation(self, result: Evaluation, num_samples: int) -> None:
        """Report the result of an evaluation, whose time belongs to no step."""
        self.timer.end_step()
        epoch, config = self.sampler.epoch, self.config
        metrics = {
            "accuracy": result.accuracy,
            "top5_accuracy": result.top5_accuracy,
            "test_loss": result.loss,
            **({"perplexity": result.perplexity} if config.is_language else {}),
            "epoch": float(epoch),
        }
        self.reports.write(metrics, self.progress.step)
        perplexity = f"perplexity {result.perplexity:.2f}, " if config.is_language else ""
        number = num_samples * config.predictions_per_sample
        self.reports.say(
            f"epoch {epoch} of {config.epochs}: {perplexity}{result.accuracy:.2%} of {number:,} "
            f"test {config.unit} right, {result.top5_accuracy:.2%} among the five likeliest"
        )

    def end_step(self, loss_sum: Tensor, num_samples: int, *, counts: bool) -> None:
        """Record a step.

        Args:
            loss_sum: Sum of the losses of this rank's samples.
            num_samples: Number of this rank's samples.
            counts: False if another rank of the replica has the same samples.
        """
        with self.exact.ending(next_step=self.progress.step + 1) as is_exact:
            times = self.timer.end_step()
        self.interval.add_times(times, is_exact=is_exact)
        if counts:
            self.interval.add(loss_sum, num_samples)
        self.watch.busy_s = times.data_s + times.compute_s
        self.watch.beat(self.progress.step)
        for slow in self.stragglers.add(times) if is_exact and self.has_peers else []:
            rank = dist.get_process_group_ranks(self.peers)[slow.rank]
            text = f"rank {rank} is slow: {slow.ratio:.1f} times as long, by its {slow.part}"
            self.reports.say(text, on_first_of=self.peers)
            self.reports.write({"straggler_ratio": slow.ratio}, self.progress.step)

    def is_due(self) -> bool:
        """Return True if it is time to report; the same on all ranks."""
        step = self.progress.step
        return step % LOG_EVERY == 0 or self.sampler.position == 0

    def is_time_to_agree(self) -> bool:
        """Return True if the ranks should now agree on whether to stop; the same on all ranks.

        They agree about once a second, every one to ten steps, because each agreement needs a
        collective, which takes a millisecond on a CPU.
        """
        return self.progress.step % self.steps_per_agreement == 0

    def tell(self, lr: float, bad_images: int, checkpoints: Checkpoints) -> int:
        """Report the means over the steps since the last report; called on all ranks.

        Returns:
            The number of this epoch's images that could not be read, summed over all ranks.
        """
        step, interval, device = self.progress.step, self.interval, self.costs.device
        seconds, of_all = interval.seconds(), interval.of_all_ranks(bad_images)
        self.steps_per_agreement = steps_in(AGREE_EVERY_S, of_all.step_s)
        results = {
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
        self.reports.write(results, step)
        self.reports.show(step, _line(results, self.config.unit))
        if not math.isfinite(results["loss"]):
            lr = self.config.lr
            raise ConfigError(
                f"step {step}: the loss is {results['loss']}: try a smaller lr than {lr:g}"
            )
        self.interval = Interval(self.costs.device)
        return of_all.bad_images

    def _speed(self) -> dict[str, float]:
        """Return the speed of all ranks together."""
        interval = self.interval
        number = interval.num_samples * self.config.predictions_per_sample
        per_s = self.monitoring.throughput(number, interval.all_s)
        flops = self.costs.flops_per_sample * interval.num_samples
        mfu = self.monitoring.mfu(flops, interval.all_s, self.costs.peak_flops_per_s)
        return {f"{self.config.unit}_per_s": per_s, "mfu": mfu}


def _wait_for(device: torch.device) -> Callable[[], object]:
    """Return a function that waits until a device has done this rank's own work so far.

    On a GPU, that is the work on the stream that computes. Messages have streams of their own, for
    which a wait for the whole device would wait, too: the time until a slow rank sends its message
    would count as the work of all ranks.
    """
    is_gpu = device.type == "cuda"
    return torch.cuda.current_stream(device).synchronize if is_gpu else lambda: None


def steps_in(seconds: float, step_s: float) -> int:
    """Return how many steps fit into ``seconds``, but at least 1 and at most LOG_EVERY."""
    return LOG_EVERY if LOG_EVERY * step_s < seconds else max(int(seconds / step_s), 1)


def steps_of_epoch(sampler: Any) -> int:
    """Return the number of global batches in a whole epoch."""
    return -(-int(sampler.num_samples) // int(sampler.global_batch))


def _line(results: dict[str, float], unit: str) -> str:
    speed = f"{results[f'{unit}_per_s']:,.0f} {unit}/s"
    mfu = f"  MFU {results['mfu']:.1%}" if results["mfu"] >= LEAST_MFU else ""
    return f"epoch {results['epoch']:.2f}  loss {results['loss']:.3f}  {speed}{mfu}"
