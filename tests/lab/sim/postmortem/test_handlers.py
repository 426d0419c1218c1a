"""Finding the exception handlers that may cause a line to be skipped."""

from pathlib import Path

import pytest

from distlab.sim.postmortem.handlers import Skipper, skipper_of

LINE = "reduce()"


@pytest.fixture
def site_in(tmp_path: Path):
    """Return a function that writes source code and returns the site of its ``reduce()`` line."""

    def write(source: str) -> tuple[str, int, str]:
        file = tmp_path / f"program{len(list(tmp_path.iterdir()))}.py"
        file.write_text(source, encoding="utf-8")
        lines = source.splitlines()
        return str(file), next(n for n, line in enumerate(lines, 1) if LINE in line), "f"

    return write


UNDER_IT = """
def f():
    try:
        load()
        reduce()
    except {kind}:
        {then}
"""
BEFORE_IT = """
def f():
    for step in steps:
        try:
            load()
        except ValueError:
            {then}
        reduce()
"""
SUPPRESSED = """
def f():
    with contextlib.suppress(KeyError):
        reduce()
"""
HELPER = """
def load(path):
    try:
        return open(path)
    except OSError:
        return None
"""
ELSEWHERE = """
def g():
    try:
        load()
    except ValueError:
        return

def f():
    reduce()
"""


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (UNDER_IT.format(kind="ValueError", then="pass"), Skipper("except", 6)),
        (UNDER_IT.format(kind="ValueError", then="raise"), None),
        (UNDER_IT.format(kind="KeyboardInterrupt", then="pass"), None),
        (BEFORE_IT.format(then="continue"), Skipper("except", 6)),
        (BEFORE_IT.format(then="pass"), None),
        (SUPPRESSED, Skipper("suppress", 3)),
        (ELSEWHERE, None),
        (f"{HELPER}\nreduce()", None),
        (UNDER_IT.format(kind="OSError", then="if x:\n            raise"), Skipper("except", 6)),
        ("reduce()", None),
        ("reduce()\0", None),
        ("def f(:\n    reduce()", None),
    ],
)
def test_what_may_skip_a_line(source: str, found: Skipper | None, site_in) -> None:
    assert skipper_of(site_in(source)) == found
