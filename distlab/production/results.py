"""What a run leaves for people: its configuration, its result, and a picture."""

import json

import torch
import torch.distributed as dist

from distlab.production.config import Config, to_yaml
from distlab.production.curve import draw_curve
from distlab.production.evaluation import as_one_model
from distlab.production.optimization import ModelMean
from distlab.production.progress import Progress
from distlab.production.saving import say, write_whole
from distlab.production.strategies import Strategy


def write_config(config: Config) -> None:
    """Write all keys, with the values that this run has, to ``run_dir``/config.yaml."""
    if dist.get_rank() == 0:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(config.run_dir / "config.yaml", to_yaml(config))


def conclude(config: Config, progress: Progress, strategy: Strategy, mean: ModelMean) -> None:
    """Write ``run_dir``/result.json, curve.png and model.pt, and tell where they are.

    model.pt is what was evaluated, for ``torch.load(…, weights_only=True)``, without the optimizer;
    where ranks hold parts of the model, there is none. All ranks call it.
    """
    with as_one_model(strategy, mean):
        if dist.get_rank() == 0 and not config.is_sharded and config.strategy != "fsdp":
            partial = config.run_dir / ".model.pt"
            torch.save(strategy.module.state_dict(), partial)
            partial.replace(config.run_dir / "model.pt")
    if dist.get_rank() == 0:
        found = {
            "accuracy": progress.accuracy,
            "top5_accuracy": progress.top5_accuracy,
            "steps": progress.step,
            "epochs": config.epochs,
        }
        write_whole(config.run_dir / "result.json", f"{json.dumps(found)}\n")
        draw_curve(config.run_dir)
        say(f"{progress.accuracy:.2%} of the test images are right: {config.run_dir}/curve.png")
