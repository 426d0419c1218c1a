"""What tests of the trainer leave behind is ended after each file."""

from collections.abc import Iterator

import pytest
from processes import end_fork_server


@pytest.fixture(autouse=True, scope="module")
def no_fork_server_stays() -> Iterator[None]:
    yield
    end_fork_server()
