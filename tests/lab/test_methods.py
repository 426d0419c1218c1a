"""The table of Phase 2's methods in docs/methods.md matches the program that measures them."""

import re
from pathlib import Path

import methods
import pytest

from distlab import launch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "methods.md"
ROW = re.compile(r"^\| ([^|]+) \| (\d+)" + r" \| ([^|]+)" * 5 + r" \|$", re.MULTILINE)
METHODS = {f"{method.name} ({method.tasks})": method for method in methods.METHODS}
ROWS = {cells[0]: cells[1:] for cells in ROW.findall(PAGE.read_text())}
EXACT = (  # bytes and calls, which are the same in every run
    "accumulate",
    "accumulate_over_ranks",
    "mixed",
    "checkpoint_memory",
    "one_f_one_b",
    "attention",
    "vocabulary",
    "sequence",
)


def test_the_page_has_a_row_for_every_method() -> None:
    assert list(ROWS) == list(METHODS)


@pytest.mark.parametrize("body", EXACT)
def test_what_is_counted_is_what_the_page_says(body: str) -> None:
    (name,) = (name for name, method in METHODS.items() if method.body.__name__ == body)
    found = launch.simulate(METHODS[name].body, methods.RANKS, cluster=methods.LAPTOP).results
    assert ROWS[name][4] == f"{found[0]:.3g}"
