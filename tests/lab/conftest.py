"""What several files of tests share."""

from collections.abc import Iterator

import pytest
from fresh_pytest import FreshPytest


@pytest.fixture(scope="module")
def fresh_pytest() -> Iterator[FreshPytest]:
    """Run pytest in a process of its own."""
    running = FreshPytest()
    yield running
    running.close()
