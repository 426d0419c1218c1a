"""Running the command line in the test's own process."""

import pytest

from distlab.cli import main


def distlab(*arguments: str) -> int:
    """Run the command, and return its exit code."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert isinstance(left.value.code, int)
    return left.value.code
