"""Fixtures that several files of tests share."""

import gc
import socket
import sys
import uuid
from collections.abc import Iterator

import forked_python
import processes
import pytest
from hypothesis import HealthCheck, settings

# How fast inputs are drawn says something about the machine only.
settings.register_profile("any machine", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_finish() -> None:
    """Freeze nothing, as a program does: each simulation in this process counts what is frozen."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def program_source() -> Iterator[socket.socket | None]:
    """The process that programs are forked from; started when a test first wants it."""
    if sys.platform != "linux":
        yield None
        return
    with forked_python.source() as source:
        yield source


@pytest.fixture
def forked(program_source: socket.socket | None) -> Iterator[None]:
    """Fork what is started in Python, the grader and fork servers too, so that torch is there."""
    forked_python.fork_from(program_source)
    yield
    forked_python.fork_from(None)


@pytest.fixture
def fresh_pytest(forked: None) -> processes.FreshPytest:
    """Run pytest in a fork; tests of its start, or of signals to it, start a real process."""
    return processes.fresh_pytest


@pytest.fixture
def mark() -> Iterator[str]:
    """A variable of all processes of a test, which are ended after it."""
    name = uuid.uuid4().hex
    yield name
    for process in processes.marked(name):
        process.kill()
