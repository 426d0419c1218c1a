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

# Slow input generation says something about the machine, not about the code.
settings.register_profile("any machine", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_finish() -> None:
    """Undo gc.freeze(): a simulation calls it itself, but only if no object is frozen yet."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def program_source() -> Iterator[socket.socket | None]:
    """The process that programs are forked from; started when a test first needs it."""
    if sys.platform != "linux":
        yield None
        return
    with forked_python.source() as source:
        yield source


@pytest.fixture
def forked(program_source: socket.socket | None) -> Iterator[None]:
    """Fork every Python program, even graders and fork servers, so that torch is already loaded."""
    forked_python.fork_from(program_source)
    yield
    forked_python.fork_from(None)


@pytest.fixture
def fresh_pytest(forked: None) -> processes.FreshPytest:
    """Run pytest in a fork; tests of its startup, or of signals to it, start a real process."""
    return processes.fresh_pytest


@pytest.fixture
def mark() -> Iterator[str]:
    """An environment value that marks a test's processes; they are killed after the test."""
    name = uuid.uuid4().hex
    yield name
    for process in processes.marked(name):
        process.kill()
