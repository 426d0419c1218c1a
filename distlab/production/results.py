"""The files that a run leaves: its configuration, result, curves and model."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from distlab.process_group.base import BaseGroup
from distlab.production.config import Config, to_yaml
from distlab.production.errors import ConfigError
from distlab.production.evaluation import as_one_model
from distlab.production.language import as_text, continued
from distlab.production.optimization import ModelMean
from distlab.production.progress import Progress
from distlab.production.saving import say
from distlab.production.strategies import Strategy
from distlab.production.strategies.mesh import Mesh
from distlab.util import files
from distlab.util.text import bytes_text, counted


def begin(config: Config, progress: Progress) -> None:
    """Print what is trained, and write all keys with their values to ``run_dir``/config.yaml.

    Raises:
        ConfigError: The run has already trained for more than ``epochs``.
    """
    if progress.evaluated > config.epochs:
        raise ConfigError(
            f"{config.run_dir} has been trained for {progress.evaluated} epochs, and epochs is "
            f"{config.epochs}: choose another run_dir"
        )
    ranks = counted(dist.get_world_size(), "rank")
    ranks += ", simulated: times are virtual" * (config.backend == "sim")
    say(f"{config.model} on {config.data}, strategy {config.strategy}, {ranks}: {config.run_dir}")
    if progress.evaluated == config.epochs:
        say(f"{config.run_dir} is complete, so nothing is trained: raise epochs or change run_dir")
    if dist.get_rank() == 0:
        files.write_whole(config.run_dir / "config.yaml", to_yaml(config).encode())


def conclude(
    config: Config, progress: Progress, strategy: Strategy, mean: ModelMean, texts: Any
) -> None:
    """Write ``run_dir``/result.json, curve.png and model.pt, and print the accuracy.

    A language model then continues the first of the test ``texts``.

    model.pt is the evaluated model without its optimizer, for ``torch.load(…, weights_only=True)``;
    it is not written if each rank holds only a part of the model. Called on all ranks.
    """
    with as_one_model(strategy, mean):
        if dist.get_rank() == 0 and not config.is_sharded and config.strategy != "fsdp":
            partial = config.run_dir / ".model.pt"
            torch.save(strategy.module.state_dict(), partial)
            partial.replace(config.run_dir / "model.pt")
        if config.is_language:
            prompt, written = (as_text(part, config) for part in continued(strategy, texts))
            say(f"after “{prompt}” it writes: {written}")
    for line in _traffic(strategy.mesh):
        say(line)
    if dist.get_rank() == 0:
        result = progress.newest
        values = {"steps": progress.step, "epochs": config.epochs, **result._asdict()}
        values |= {"perplexity": result.perplexity} if config.is_language else {}
        results = {name: value for name, value in values.items() if math.isfinite(value)}
        files.write_whole(config.run_dir / "result.json", f"{json.dumps(results)}\n".encode())
        _draw_curve(config.run_dir, config.unit)
        perplexity = f"perplexity {result.perplexity:.2f}, " if config.is_language else ""
        say(
            f"{perplexity}{result.accuracy:.2%} of the test {config.unit} are right: "
            f"{config.run_dir}/curve.png"
        )


def _traffic(mesh: Mesh) -> list[str]:
    """Return a line for each group, with this rank's calls and bytes; gloo and NCCL count none."""
    groups = {"all ranks": dist.group.WORLD, "replicas": mesh.replicas, "stages": mesh.stages}
    groups |= {"shards": mesh.shards, "first and last stage": mesh.ends}
    lines = []
    for name, group in groups.items():
        if isinstance(group, BaseGroup) and group.counts.calls:
            calls = (
                f"{number:,} {call} ({bytes_text(group.counts.num_bytes[call])})"
                for call, number in group.counts.calls.items()
            )
            lines.append(f"collectives of rank 0 among {name}: {', '.join(calls)}")
    return lines


def _draw_curve(run_dir: Path, unit: str) -> None:
    """Draw ``run_dir``/curve.png from metrics.rank0.jsonl, rank 0's metrics."""
    lines = (run_dir / "metrics.rank0.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, accuracy, speed = figure.subplots(1, 3)
    _draw(loss, records, "loss", "training loss", "cross entropy")
    _draw(accuracy, records, "accuracy", "test accuracy", "%", factor=100.0, marker="o")
    _draw(speed, records, f"{unit}_per_s", "speed of all ranks", f"{unit}/s")
    speed.set_ylim(bottom=0)
    figure.savefig(run_dir / "curve.png", dpi=110)


def _draw(
    axes: Axes,
    records: list[dict[str, Any]],
    name: str,
    title: str,
    unit: str,
    *,
    factor: float = 1.0,
    marker: str = "",
) -> None:
    points = [(r["epoch"], factor * float(r[name])) for r in records if name in r]
    axes.plot(*zip(*points, strict=True), marker=marker, markersize=4, color="#3b6fb6")
    axes.set(title=title, xlabel="epoch", ylabel=unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
