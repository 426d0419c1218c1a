"""What a run leaves for people: its configuration, its result, and a picture."""

import json

import torch.distributed as dist

from distlab.production.config import Config, to_yaml
from distlab.production.curve import draw_curve
from distlab.production.progress import Progress
from distlab.production.saving import say, write_whole


def write_config(config: Config) -> None:
    """Write all keys, with the values that this run has, to ``run_dir``/config.yaml."""
    if dist.get_rank() == 0:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(config.run_dir / "config.yaml", to_yaml(config))


def conclude(config: Config, progress: Progress) -> None:
    """Write ``run_dir``/result.json and curve.png, and tell where they are."""
    if dist.get_rank() != 0:
        return
    found = {"accuracy": progress.accuracy, "steps": progress.step, "epochs": config.epochs}
    write_whole(config.run_dir / "result.json", f"{json.dumps(found)}\n")
    draw_curve(config.run_dir)
    say(f"{progress.accuracy:.2%} of the test images are right: {config.run_dir}/curve.png")
