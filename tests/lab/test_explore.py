"""Notebook helpers: choosing whose functions to show, and timing passes."""

import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from distlab.explore import IDEAL, Span, try_yours, watch_passes
from distlab.launch import simulate
from distlab.sim import simulate as simulate_here
from phase1_data_parallel import template_collectives

COLLECTIVES = "phase1_data_parallel.collectives"
Broadcast = Callable[[Tensor], None]


def broadcast_once(broadcast: Broadcast) -> float:
    x = torch.full((1,), float(dist.get_rank() + 7))
    broadcast(x)
    return x.item()


def run(broadcast: Broadcast) -> list[float]:
    return simulate(broadcast_once, 2, broadcast).results


# Whose functions are shown


def test_yours_are_shown_if_they_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(template_collectives, "broadcast", lambda x: x.fill_(3))
    assert try_yours(COLLECTIVES, "broadcast", run) == [3.0, 3.0]
    assert capsys.readouterr().out == "broadcast: you see your own.\n"


def test_the_solution_is_shown_for_a_todo(capsys: pytest.CaptureFixture[str]) -> None:
    assert try_yours(COLLECTIVES, "broadcast", run) == [7.0, 7.0]
    assert capsys.readouterr().out == "broadcast: not written yet, so you see the solution.\n"


def test_the_solution_is_shown_for_an_error_and_its_first_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(template_collectives, "broadcast", lambda x: x[5])
    assert try_yours(COLLECTIVES, "broadcast", run) == [7.0, 7.0]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("broadcast: not working yet (rank 0 of 2 raised IndexError")
    assert line.endswith("), so you see the solution.")


def test_the_solution_is_shown_for_a_file_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "phase1_data_parallel.template_collectives", None)
    assert try_yours(COLLECTIVES, "broadcast", run) == [7.0, 7.0]
    assert "broadcast: not working yet (import of" in capsys.readouterr().out


def test_only_what_is_not_written_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(template_collectives, "broadcast", lambda x: x.fill_(3))
    names = "broadcast all_reduce_naive"
    try_yours(COLLECTIVES, names, lambda *both: (run(both[0]), run(both[1])))
    assert capsys.readouterr().out == (
        "broadcast, all_reduce_naive: all_reduce_naive is not written yet, "
        "so you see the solution.\n"
    )


def test_without_solutions_a_todo_ends_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"solutions.{COLLECTIVES}", None)
    with pytest.raises(SystemExit, match=r"broadcast: not written yet, and this copy .* no sol"):
        try_yours(COLLECTIVES, "broadcast", run)


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
