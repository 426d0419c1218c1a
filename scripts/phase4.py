"""A run that may be stopped or killed at any moment, and goes on when it is started again.

    torchrun --nproc_per_node=2 scripts/phase4.py out/run 1000

It trains a small model for 1000 steps, with a checkpoint in every 50 in ``out/run``, and prints
where it begins and what the parameters are in the end: the same, however often it was interrupted.
"""

import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from solutions.phase4_production.checkpoint import load_checkpoint, save_checkpoint
from solutions.phase4_production.fault_tolerance import StopRequest

SAVE_EVERY = 50
STEP_S = 2e-3  # stands for the computing of a larger model


def main() -> None:
    """Train in the folder, and for the number of steps, that the command line names."""
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    folder.parent.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    train(folder, num_steps)
    dist.destroy_process_group()


def train(folder: Path, num_steps: int) -> None:
    """Go on from the newest checkpoint, and stop where all ranks agree to."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    first = resume(folder, model, optimizer)

    def save(step: int) -> None:
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(state, folder, step)

    with StopRequest([signal.SIGTERM, signal.SIGINT]) as stop:
        for step in range(first + 1, num_steps + 1):
            train_step(model, optimizer, step)
            if stop.agreed():
                say(f"stopped after step {step}")
                stop.leave(lambda step=step: save(step))  # type: ignore[misc]
            if step % SAVE_EVERY == 0 or step == num_steps:
                save(step)
    say(f"after step {num_steps}: {parameters_of(model)}")


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint, if there is one; return its step."""
    loaded = load_checkpoint(folder)
    for path, reason in (loaded.skipped if loaded else {}).items():
        say(f"skipped {path.name}: {reason}")
    if loaded is None:
        say("begins with step 1")
        return 0
    model.load_state_dict(loaded.state["model"])
    optimizer.load_state_dict(loaded.state["optimizer"])
    say(f"goes on after step {loaded.step}")
    return loaded.step


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Train on a batch that step and rank decide."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(16, 8, generator=generator)
    optimizer.zero_grad()
    loss: Any = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    time.sleep(STEP_S)


def parameters_of(model: nn.Module) -> str:
    """Write all bits of the parameters."""
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return " ".join(f"{number & 0xFFFFFFFF:08x}" for number in flat.view(torch.int32).tolist())


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
