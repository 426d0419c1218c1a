"""4.2 with a real DataLoader and real checkpoints: a resumed run is the same run."""

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from solutions.phase4_production.checkpoint import load_checkpoint, save_checkpoint
from solutions.phase4_production.training_state import ResumableSampler, TrainingState

NUM_SAMPLES, GLOBAL_BATCH, NUM_STEPS = 22, 4, 9  # six steps in an epoch


@pytest.fixture(autouse=True)
def world_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Samples(Dataset[tuple[int, Tensor]]):
    """Samples of an index and a row that follows from it."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.linspace(0, 1, 4) * index / NUM_SAMPLES


class Run:
    """A training whose DataLoader has two workers, which ask ahead."""

    def __init__(self, seed: int, *, has_own_generator: bool = True) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, NUM_STEPS)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.sampler = ResumableSampler(NUM_SAMPLES, GLOBAL_BATCH, seed)
        names = ("model", "optimizer", "scheduler", "scaler", "sampler")
        self.training = TrainingState({name: getattr(self, name) for name in names})
        self.loader = DataLoader(
            Samples(),
            batch_sampler=self.sampler,
            num_workers=2,
            generator=torch.Generator() if has_own_generator else None,
        )
        self.samples: list[list[int]] = []
        for set_seed in (random.seed, np.random.seed, torch.manual_seed):
            set_seed(seed)

    def train(self, num_steps: int) -> None:
        while num_steps > 0:
            for indexes, x in self.loader:
                self._step(x)
                self.samples.append(indexes.tolist())
                self.sampler.advance()
                num_steps -= 1
                if num_steps == 0:
                    return

    def _step(self, x: Tensor) -> None:
        noise = random.gauss(0, 0.1) + float(np.random.randn())
        self.optimizer.zero_grad()
        loss = (self.model(x + noise) - 1).square().sum() / GLOBAL_BATCH
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def bits(self) -> list[Any]:
        flat = [parameter.detach().flatten() for parameter in self.model.parameters()]
        scale = self.scaler.state_dict(), self.scheduler.state_dict(), self.sampler.state_dict()
        draws = random.random(), float(np.random.rand()), float(torch.rand(()))
        return [torch.cat(flat).view(torch.int32).tolist(), scale, draws]


def resumed(folder: Path, seed: int, **options: bool) -> Run:
    run, loaded = Run(seed, **options), load_checkpoint(folder)
    assert loaded is not None
    run.training.load_state_dict(loaded.state)
    return run


@pytest.mark.parametrize("stops", [[2], [6], [1, 4]], ids=str)
def test_a_run_with_workers_goes_on_bit_for_bit(stops: list[int], tmp_path: Path) -> None:
    straight = Run(3)
    straight.train(NUM_STEPS)
    right = straight.bits()
    run, samples, done = Run(3), [], 0
    for stop in stops:
        run.train(stop - done)
        save_checkpoint(run.training.state_dict(), tmp_path / "run", stop)
        samples, done = samples + run.samples, stop
        run = resumed(tmp_path / "run", 100 + stop)
    run.train(NUM_STEPS - done)
    assert samples + run.samples == straight.samples
    assert run.bits() == right
    assert sorted(chain(*straight.samples[:6])) == [*range(NUM_SAMPLES)]


def test_without_a_generator_of_its_own_the_loader_draws_from_training(tmp_path: Path) -> None:
    straight = Run(3, has_own_generator=False)
    straight.train(NUM_STEPS)
    right = straight.bits()
    run = Run(3, has_own_generator=False)
    run.train(2)
    save_checkpoint(run.training.state_dict(), tmp_path / "run", 2)
    run = resumed(tmp_path / "run", 9, has_own_generator=False)
    run.train(NUM_STEPS - 2)
    assert run.samples == straight.samples[2:]
    assert run.bits()[0] != right[0], "the pitfall of guidelines.md is none"
