"""Outputs for training metrics: a progress bar, JSON lines, TensorBoard and Prometheus."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from distlab.production.config import Config
from distlab.production.errors import ConfigError
from distlab.production.lessons import Lessons
from distlab.production.saving import last_line, say
from distlab.production.types import Group

METRICS = (
    *("loss", "lr", "epoch", "accuracy", "top5_accuracy", "test_loss", "perplexity"),
    *("samples_total", "images_per_s", "tokens_per_s", "mfu"),
    *("step_s", "data_s", "compute_s", "communication_s", "peak_memory_bytes"),
    *("bad_images_total", "checkpoint_s", "failed_saves_total", "straggler_ratio"),
)
LOG_EVERY = 10  # steps
PORT_S = 10.0  # longest wait for a port that another process still holds
# Dense bfloat16 rates, or float16 before Ampere, as published; half of a rate with sparsity where
# only that is given, as for an eighth of an HGX B200 or a 72nd of a GB200 NVL72.
_PEAK_TFLOPS: dict[float, tuple[str, ...]] = {
    65: ("Tesla T4",),
    112: ("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"),
    125: ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB", "NVIDIA A10"),
    121: ("NVIDIA L4",),
    165: ("NVIDIA A30",),
    362: ("NVIDIA L40S",),
    312: (
        *("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"),
        *("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"),
    ),
    756: ("NVIDIA H100 PCIe",),
    835: ("NVIDIA H100 NVL", "NVIDIA H200 NVL"),
    989: ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"),
    2250: ("NVIDIA B200",),
    2500: ("NVIDIA GB200",),
    1307: ("AMD Instinct MI300X",),
}
# By the name that torch reports. A GPU under another name, such as a part of one, is measured.
PEAK_FLOPS_PER_S = {name: 1e12 * rate for rate, names in _PEAK_TFLOPS.items() for name in names}


class Reports:
    """Writes the metrics of this rank, and shows those of rank 0 on the terminal."""

    def __init__(self, config: Config, lessons: Lessons, num_steps: int, first_step: int) -> None:
        self.lesson = lessons("exporters")
        self.config, self.rank, self.num_steps = config, dist.get_rank(), num_steps
        self.has_failed = False
        config.run_dir.mkdir(parents=True, exist_ok=True)
        lines = config.run_dir / f"metrics.rank{self.rank}.jsonl"
        self.writers: list[Any] = self._pages() if config.metrics_port else []
        self.writers.append(self.lesson.JsonlWriter(lines, resume_after=first_step))
        if config.tensorboard and self.rank == 0:
            folder = config.run_dir / "tensorboard"
            self.writers.append(self.lesson.TensorBoardWriter(folder, resume_after=first_step))
        self.bar = _Bar(num_steps, first_step) if self.rank == 0 and sys.stderr.isatty() else None

    def _pages(self) -> list[Any]:
        """Serve this rank's page for Prometheus; called on all ranks.

        Raises:
            ConfigError: A rank cannot get its port; raised on all ranks.
        """
        port = self.config.metrics_port + int(os.environ.get("LOCAL_RANK", "0"))
        reasons: list[Any] = [""] * dist.get_world_size()
        try:
            pages, reason = [self._page(port)], ""
        except OSError as error:
            text = error.__cause__ or error  # the advice of the exporter itself does not fit here
            pages, reason = [], f"rank {self.rank} cannot have port {port} for its page: {text}"
        dist.all_gather_object(reasons, reason)
        if failures := [text for text in reasons if text]:
            raise ConfigError(
                f"metrics_port {self.config.metrics_port}: {failures[0]}. Choose another "
                "metrics_port, or 0 for no pages"
            )
        return pages

    def _page(self, port: int) -> Any:
        """Serve this rank's page, waiting up to ``PORT_S`` for its port."""
        labels = {"run": self.config.run_dir.name, "rank": str(self.rank)}
        end_s = time.monotonic() + PORT_S
        while True:
            try:
                return self.lesson.PrometheusExporter(labels, port, self.config.metrics_host)
            except OSError:  # a run that was just killed may still hold the port
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.2)

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Write metrics to all outputs; the names must be in METRICS."""
        for writer in self.writers:
            try:
                writer.write(metrics, step)
            except OSError as error:
                self._note_failed(error)

    def _note_failed(self, error: OSError) -> None:
        """Warn once that metrics cannot be written: a full disk must not end a training run."""
        if not self.has_failed:
            self.has_failed = True
            text = f"warning: rank {self.rank}: metrics of some steps are lost: {error}"
            print(text, file=sys.stderr, flush=True)

    def show(self, step: int, text: str) -> None:
        """On rank 0, show the progress of the run."""
        line = f"step {step:,} of {self.num_steps:,}  {text}"
        last_line.append(line)
        if self.bar:
            self.bar.show(step, text)
        else:
            say(line)

    def say(self, text: str, on_first_of: Group = None) -> None:
        """On the first rank of a group, print a line that no progress bar overwrites."""
        if self.bar and dist.get_rank(on_first_of) == 0:
            self.bar.print(text)
        elif dist.get_rank(on_first_of) == 0:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Flush and close all outputs."""
        if self.bar:
            self.bar.close()
        for writer in self.writers:
            writer.close()


class _Bar:
    """A progress bar on a terminal."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        self.progress = Progress(
            TextColumn("{task.completed:>6}/{task.total} steps"),
            BarColumn(),
            TextColumn("{task.description}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        self.task = self.progress.add_task("", total=num_steps, completed=first_step)
        self.progress.start()

    def show(self, step: int, text: str) -> None:
        self.progress.update(self.task, completed=step, description=text)

    def print(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self.progress.stop()


def peak_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak rate for MFU: from a GPU's data sheet, or the best of three runs.

    Cost: a few milliseconds if the rate is measured.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if name in PEAK_FLOPS_PER_S and dtype.itemsize == 2:
            return PEAK_FLOPS_PER_S[name]
    return max(_measured(device, dtype) for _ in range(3))


def _measured(device: torch.device, dtype: torch.dtype) -> float:
    side = 4096 if device.type == "cuda" else 512
    a = torch.randn(side, side, device=device, dtype=dtype)
    seconds = _seconds_of(lambda: a @ a, device)
    return 2.0 * side**3 / seconds


def _seconds_of(call: Callable[[], object], device: torch.device) -> float:
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun_s = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun_s
