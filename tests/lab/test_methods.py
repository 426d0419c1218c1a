"""The table that compares the methods of Phase 2: its rows are those of the program behind it."""

import ast
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
EXACT = (  # bytes and calls: the same in every run
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


@pytest.mark.parametrize("name", METHODS)
def test_a_row_has_the_lines_and_the_formula_of_its_method(name: str) -> None:
    lines, what, formula, predicted, *_ = ROWS[name]
    method = METHODS[name]
    assert (int(lines), what, formula) == (method.lines, method.what, method.formula)
    assert predicted == f"{method.predicted:.3g}"


@pytest.mark.parametrize("name", METHODS)
def test_what_was_simulated_is_near_the_formula(name: str) -> None:
    simulated = float(ROWS[name][4])
    assert simulated == pytest.approx(METHODS[name].predicted, rel=0.1)


@pytest.mark.parametrize("body", EXACT)
def test_what_is_counted_is_what_the_page_says(body: str) -> None:
    (name,) = (name for name, method in METHODS.items() if method.body.__name__ == body)
    found = launch.simulate(METHODS[name].body, methods.RANKS, cluster=methods.LAPTOP).results
    assert ROWS[name][4] == f"{found[0]:.3g}"


def test_lines_are_those_of_code() -> None:
    function = 'def f(x):\n    """What it does."""\n    # why\n\n    return g(x)\n'
    assert methods.code_lines(ast.parse(function).body[0]) == 2
