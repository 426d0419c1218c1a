"""What several files of tests share."""

from collections.abc import Iterator

import pytest
from fresh_pytest import FreshPytest
from hypothesis import HealthCheck, settings

# How fast inputs are drawn says something about the machine only.
settings.register_profile("any machine", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="module")
def fresh_pytest() -> Iterator[FreshPytest]:
    """Run pytest in a process of its own."""
    running = FreshPytest()
    yield running
    running.close()
