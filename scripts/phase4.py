"""A run that may be stopped or killed at any moment, and continues when it is started again.

    torchrun --nproc_per_node=2 scripts/phase4.py out/run 1000

It trains a small model for 1000 steps, with a checkpoint every 50 steps in ``out/run``, and prints
the step at which it starts and the final parameters, which do not depend on interruptions.
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
from solutions.phase4_production.training_state import ResumableSampler, TrainingState

SAVE_EVERY = 50
STEP_S = 2e-3  # simulates the computation of a larger model
NUM_SAMPLES, GLOBAL_BATCH = 1000, 32  # an epoch ends in the 32nd step, between two checkpoints


class Run:
    """The model, and the state from which its training continues."""

    def __init__(self) -> None:
        """Build the model and its training state, with a different dropout seed on each rank."""
        torch.manual_seed(0)
        self.x = torch.randn(NUM_SAMPLES, 8)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 100, 0.9)
        self.sampler = ResumableSampler(NUM_SAMPLES, GLOBAL_BATCH)
        torch.manual_seed(1 + dist.get_rank())
        self.state = TrainingState(
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "scheduler": self.scheduler,
                "sampler": self.sampler,
            }
        )

    def step(self) -> None:
        """Train on this rank's share of the next global batch."""
        batch_size = min(GLOBAL_BATCH, NUM_SAMPLES - self.sampler.position)  # total over all ranks
        x = self.x[next(iter(self.sampler))]
        self.optimizer.zero_grad()
        loss: Any = (self.model(x) - x.sum(1, keepdim=True)).square().sum() / batch_size
        loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.scheduler.step()
        self.sampler.advance()
        time.sleep(STEP_S)


def main() -> None:
    """Train; the command line gives the checkpoint folder and the number of steps."""
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    folder.parent.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    train(Run(), folder, num_steps)
    dist.destroy_process_group()


def train(run: Run, folder: Path, num_steps: int) -> None:
    """Train from the newest checkpoint to the last step, or until all ranks agree to stop."""
    first = resume(run, folder)

    def save(step: int) -> None:
        state = run.state.state_dict()  # gathers the generator states of all ranks
        if dist.get_rank() == 0:
            save_checkpoint(state, folder, step)

    with StopRequest([signal.SIGTERM, signal.SIGINT]) as stop:
        for step in range(first + 1, num_steps + 1):
            run.step()
            if stop.agreed():
                say(f"stopped after step {step}")
                stop.leave(lambda step=step: save(step))  # type: ignore[misc]
            if step % SAVE_EVERY == 0 or step == num_steps:
                save(step)
    say(f"after step {num_steps}: {parameters_of(run.model)}")


def resume(run: Run, folder: Path) -> int:
    """Load the newest checkpoint, and return its step; return 0 if there is none."""
    loaded = load_checkpoint(folder)
    for path, reason in (loaded.skipped if loaded else {}).items():
        say(f"skipped {path.name}: {reason}")
    if loaded is None:
        say("begins with step 1")
        return 0
    run.state.load_state_dict(loaded.state)
    say(f"goes on after step {loaded.step}")
    return loaded.step


def parameters_of(model: nn.Module) -> str:
    """Return the parameters as text that shows every bit."""
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return " ".join(f"{number & 0xFFFFFFFF:08x}" for number in flat.view(torch.int32).tolist())


def say(text: str) -> None:
    """Print a line on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
