"""Notebook helpers: choosing whose functions to show, and timing passes."""

import re
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from distlab import lessons
from distlab.explore import IDEAL, Span, watch_passes, yours
from distlab.sim import simulate as simulate_here
from phase1_data_parallel import template_collectives
from solutions.phase1_data_parallel import collectives

LESSON = "phase1_data_parallel.collectives"


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A learner's copy of the collectives, with nothing written yet."""
    name = "phase1_data_parallel/template_collectives.py"
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text((lessons.COURSE / name).read_text())
    monkeypatch.setattr(lessons, "COURSE", tmp_path)
    return path


# Whose functions are shown


def test_yours_is_shown_once_it_is_written(template: Path) -> None:
    todo = re.compile(r"raise NotImplementedError\([^)]*broadcast[^)]*\)")
    template.write_text(todo.sub("pass", template.read_text()))
    assert yours(LESSON, "broadcast") is template_collectives.broadcast


def test_the_solution_is_shown_for_a_todo(
    template: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert yours(LESSON, "broadcast") is collectives.broadcast
    assert capsys.readouterr().out == "broadcast is not written yet: this is the solution's.\n"


def test_the_solution_is_shown_for_a_function_that_uses_a_todo(template: Path) -> None:
    template.write_text(
        "def broadcast(x):\n    raise NotImplementedError('Task 1.3')\n\n"
        "def all_reduce_naive(x):\n    broadcast(x)\n"
    )
    both = yours(LESSON, "broadcast all_reduce_naive")
    assert both == [collectives.broadcast, collectives.all_reduce_naive]


def test_without_solutions_a_todo_ends_the_cell(
    template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, f"solutions.{LESSON}", None)
    with pytest.raises(SystemExit, match=r"broadcast is still .* this copy .* no solutions"):
        yours(LESSON, "broadcast")


# How passes are timed


def test_a_pass_is_watched_from_its_start_to_its_end() -> None:
    def program() -> list[Span]:
        layer, spans = nn.Linear(200, 200), list[Span]()
        watch_passes(layer, spans)
        for _ in range(2):
            layer(torch.ones(200, 200, requires_grad=True)).sum().backward()
        return spans

    (spans,) = simulate_here(program, 1, cluster=IDEAL).results
    expected_ms = [(0, 1), (1, 3), (3, 4), (4, 6)]  # 16 MFLOP forward and twice as much backward
    found_ms = [(1e3 * start, 1e3 * end) for start, end in spans]
    assert found_ms == [pytest.approx(pair, abs=1e-3) for pair in expected_ms]


# Plots


def axes() -> Axes:
    return Figure().subplots()
