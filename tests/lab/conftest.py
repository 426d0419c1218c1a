"""Fixtures that several test files share."""

import gc
import socket
import sys
import uuid
from collections.abc import Iterator

import forked_python
import processes
import pytest
from hypothesis import HealthCheck, settings

# If generating inputs is slow, the machine is to blame, not the code.
settings.register_profile(
    "any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_collection_finish() -> None:
    """Unfreeze all objects, because a simulation calls gc.freeze() only if none is frozen yet."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def program_source() -> Iterator[socket.socket | None]:
    """A socket to the process that forks programs, started on first use; None except on Linux."""
    if sys.platform != "linux":
        yield None
        return
    with forked_python.source() as source:
        yield source


@pytest.fixture
def forked(program_source: socket.socket | None) -> Iterator[None]:
    """Fork all Python programs, even graders and fork servers, from a process with torch loaded."""
    forked_python.fork_from(program_source)
    yield
    forked_python.fork_from(None)


@pytest.fixture
def fresh_pytest(forked: None) -> processes.FreshPytest:
    """A function that runs pytest in a fork.

    Tests of pytest's startup, or of signals to pytest, start a real process instead.
    """
    return processes.fresh_pytest


@pytest.fixture
def mark() -> Iterator[str]:
    """A unique value that marks a test's processes, which are killed when the test ends."""
    name = uuid.uuid4().hex
    yield name
    for process in processes.marked(name):
        process.kill()
