"""Processes that the trainer's tests share, and that end after each test file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import end_fork_server

from distlab.launch import fork_server

SLOW_IMPORTS = ("torch._dynamo", "solutions.phase4_production.imagenet_trainer")


@pytest.fixture(autouse=True, scope="module")
def no_fork_server_stays() -> Iterator[None]:
    yield
    end_fork_server()


@pytest.fixture(scope="module")
def fast_ranks() -> None:
    """Import slow modules once, in the fork server, which saves every rank seconds."""
    fork_server.load_ahead(SLOW_IMPORTS)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Make this process the only rank of a world."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
