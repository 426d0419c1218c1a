"""Data loaders that pin memory, and the copies from it to simulated GPUs."""

import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from distlab.sim import Options, simulate
from distlab.sim.gpu.syncs import FROM_PAGEABLE

PINNED = {"pin_memory": True}
WORKER = {**PINNED, "num_workers": 1}


@pytest.mark.parametrize(
    ("settings", "num_waits"),
    [(PINNED, 0), ({}, 8), (WORKER, 0), ({**WORKER, "persistent_workers": True}, 0)],
)
def test_only_batches_in_pageable_memory_make_the_host_wait(
    settings: dict[str, Any], num_waits: int
) -> None:
    def main() -> float:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, **settings)
        total = torch.zeros((), device="cuda")
        for _ in range(2):
            for (batch,) in loader:
                assert batch.is_pinned() == bool(settings)
                total += batch.to("cuda", non_blocking=True).sum()
        return total.item()

    world = simulate(main, 2, cluster="dgx-h100", options=Options(semantics="nccl"))
    assert world.results == [56.0, 56.0]
    assert world.gpu_time is not None
    assert not world.gpu_time.wrong
    waits = [wait for wait in world.gpu_time.host_waits if wait.reason == FROM_PAGEABLE]
    assert sum(wait.count for wait in waits) == 2 * num_waits
