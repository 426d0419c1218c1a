"""``sharding_strategy: auto``: the lowest ZeRO stage at which the states fit into memory."""

import os
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn

from distlab.production.config import Config
from distlab.production.saving import say

SHARE = 0.5  # share of a rank's memory for states; activations and buffers need the rest
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # a container's limit: a number, or "max"


def choose_stage(config: Config, model: nn.Module) -> Config:
    """Return the configuration with the chosen ZeRO stage; called on all ranks.

    With ``sharding_strategy: auto``, the choice is the lowest stage, from ``zero_redundancy`` up,
    at which a rank's states take at most half of its memory, or the highest stage if none fits.
    Rank 0 prints the choice with its figures. Without ``auto``, or if other keys leave no choice,
    the configuration stays as it is: a pipeline rules out every stage, and the ring every stage
    above 1.

    All of the memory of the device or machine counts, not only what is free, because a resumed run
    must choose the same stage.

    Cost: an all-reduce of one number.
    """
    num_parameters, ranks = sum(p.numel() for p in model.parameters()), dist.get_world_size()
    lowest, highest = config.zero_redundancy, _highest(config) if ranks > 1 else 0
    if config.sharding_strategy != "auto" or highest <= lowest:
        return config
    limit = SHARE * _least_memory(next(model.parameters()).device)
    needs = {
        stage: state_bytes(num_parameters, stage, ranks, config)
        for stage in range(lowest, highest + 1)
    }
    stage = next((stage for stage, need in needs.items() if need <= limit), max(needs))
    say(
        f"sharding_strategy auto: zero_redundancy {stage}, with which the states of "
        f"{num_parameters:,} parameters take {_mb(needs[stage])} on each of {ranks} ranks; "
        f"{_mb(limit)} is half of a rank's memory"
    )
    return config.model_copy(update={"zero_redundancy": stage})


def state_bytes(num_parameters: int, stage: int, ranks: int, config: Config) -> float:
    """Return the bytes of a rank's parameters, gradients, optimizer state and mean.

    All are float32, so there are no master copies. Ψ parameters on N ranks, SGD with momentum:
        stage 0    4Ψ + 4Ψ + 4Ψ          stage 2    4Ψ + (4Ψ + 4Ψ) / N
        stage 1    4Ψ + 4Ψ + 4Ψ / N      stage 3    (4Ψ + 4Ψ + 4Ψ) / N
    AdamW needs 8Ψ instead of the last 4Ψ, and SGD without momentum needs none. ``ema_decay`` adds
    4Ψ, sharded like the parameters. The unit that stage 3 gathers to compute is not counted.

    Source: Rajbhandari et al. 2020, sections 3.1 and 5, with 4 bytes instead of 2.
    """
    optimizer = 8 if config.optimizer == "adamw" else 4 if config.momentum else 0
    parameters = 8 if config.ema_decay else 4
    return num_parameters * sum(
        number / (ranks if stage >= sharded_from else 1)
        for number, sharded_from in ((optimizer, 1), (4, 2), (parameters, 3))
    )


def _highest(config: Config) -> int:
    """Return the highest ZeRO stage that the rest of the configuration allows."""
    is_whole = config.compression != "none" or config.precision == "fp16"
    is_whole = is_whole or not config.decay_norms or config.gradients != "buckets"
    if config.strategy != "course" or is_whole or config.splits_model:
        return 0
    return {"auto": 3, "native": 3, "ring": 1}.get(config.communication_pattern, 0)


def _least_memory(device: torch.device) -> float:
    """Return the memory of the rank that has the least, in bytes."""
    if device.type == "cuda":
        mine = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        mine = _machine_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    least = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float(least)


def _machine_memory() -> float:
    """Return the memory of this machine, or of its container, in bytes."""
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.exists() else ""
    total = float(psutil.virtual_memory().total)
    return min(total, float(limit)) if limit.isdecimal() else total


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
