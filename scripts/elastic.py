"""A run whose workers may come and go; start any number of them on one or several machines.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:4 --nproc_per_node=1 --max_restarts=100 --rdzv_backend=c10d \\
        --rdzv_endpoint=127.0.0.1:29400 --rdzv_conf=last_call_timeout=5 scripts/elastic.py out/run

Run the command in one terminal, then again in another: torchrun ends the worker and starts two.
Kill the second torchrun and its worker, and the first continues alone. The run trains a small model
on the bundled digits for 10 epochs. Each time it resumes, it prints the number of workers and the
step after which it resumes; at the end, it prints the accuracy. ``out/run.jsonl`` records which
worker trained on which samples. ``echo 0.2 > out/run.pace`` makes each step take 0.2 s longer; it
takes effect even during a run.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.data import load
from solutions.phase4_production.checkpoint import load_checkpoint, save_checkpoint
from solutions.phase4_production.elastic import run_elastic
from solutions.phase4_production.fault_tolerance import StopRequest

GLOBAL_BATCH, NUM_EPOCHS, SAVE_EVERY = 96, 10, 5


class Digits:
    """A small model that learns the bundled digits, and records which samples it trains on."""

    def __init__(self, folder: Path) -> None:
        """Prepare to train in a folder; the ledger (.jsonl) and the .pace file lie next to it."""
        torch.manual_seed(0)
        self.data = load("digits")
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.num_steps, self.ledger = 0, folder.with_suffix(".jsonl")
        self.pace = folder.with_suffix(".pace")
        self.start = start_number()

    def parameters(self) -> Iterable[Tensor]:
        """Return the trained parameters."""
        return self.model.parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the model and the optimizer, and the number of steps."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**state, "num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore a state, and print after which step the run continues."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]
        say(f"{dist.get_world_size()} workers go on after step {self.num_steps}")

    def add_gradients(self, samples: Sequence[int], epoch: int, /) -> None:
        """Add the gradients of the summed losses of ``samples``."""
        self._note(samples, epoch)
        images, labels = zip(*(self.data.train[sample] for sample in samples), strict=True)
        logits = self.model(torch.stack(images))
        loss: Any = nn.functional.cross_entropy(logits, torch.tensor(labels), reduction="sum")
        loss.backward()

    def _note(self, samples: Sequence[int], epoch: int) -> None:
        """Append a line to the ledger in one write, so that different workers' lines don't mix."""
        line = {
            "start": self.start,
            "world_size": dist.get_world_size(),
            "rank": dist.get_rank(),
            "pid": os.getpid(),
            "step": self.num_steps + 1,
            "epoch": epoch,
            "samples": list(samples),
        }
        with open(self.ledger, "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def step(self) -> None:
        """Update the parameters; if there is a .pace file, sleep for as long as it says."""
        self.optimizer.step()
        self.num_steps += 1
        if self.pace.exists():
            time.sleep(float(self.pace.read_text()))

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the fraction of test images that are classified correctly."""
        images, labels = zip(*self.data.test, strict=True)
        guesses = self.model(torch.stack(images)).argmax(1)
        return float((guesses == torch.tensor(labels)).float().mean())


def start_number() -> int:
    """Return a number that identifies this start of the run, the same on all workers."""
    number = [time.time_ns()]
    dist.broadcast_object_list(number, group_src=0)
    return number[0]


def say(text: str) -> None:
    """Print a line on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    """Train in the folder that the command line names."""
    folder = Path(sys.argv[1])
    folder.parent.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    with StopRequest() as stop:  # not earlier, so that SIGTERM ends a rank that waits to join
        job = Digits(folder)
        num_steps = run_elastic(
            job,
            folder,
            num_samples=len(job.data.train),
            global_batch=GLOBAL_BATCH,
            num_epochs=NUM_EPOCHS,
            save_every=SAVE_EVERY,
            micro_batch=32,
            save=save_checkpoint,
            load=load_checkpoint,
            should_stop=stop.agreed,
        )
        say(f"after step {num_steps}: {job.accuracy():.1%} of the test images are recognised")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
