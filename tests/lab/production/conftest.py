"""Processes that tests of the trainer share, and their end after each file."""

from collections.abc import Iterator

import pytest
from processes import end_fork_server

from distlab.launch import fork_server

SLOW_IMPORTS = ("torch._dynamo", "solutions.phase4_production.imagenet_trainer")


@pytest.fixture(autouse=True, scope="module")
def no_fork_server_stays() -> Iterator[None]:
    yield
    end_fork_server()


@pytest.fixture(scope="module")
def fast_ranks() -> None:
    """Import in the fork server, once, what each rank of a trainer's world imports for seconds."""
    fork_server.load_ahead(SLOW_IMPORTS)
