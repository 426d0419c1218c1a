"""What the notebooks share: whose functions they show, how passes are timed, what plots say."""

import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from distlab import plot
from distlab.explore import IDEAL, Span, try_yours, watch_passes
from distlab.launch import simulate
from distlab.sim import simulate as simulate_here
from phase1_data_parallel import template_collectives
from solutions.phase1_data_parallel import collectives

COLLECTIVES = "phase1_data_parallel.collectives"
Broadcast = Callable[[Tensor], None]


def broadcast_once(broadcast: Broadcast) -> float:
    x = torch.full((1,), float(dist.get_rank() + 7))
    broadcast(x)
    return x.item()


def run(broadcast: Broadcast) -> list[float]:
    return simulate(broadcast_once, 2, broadcast).results


# Whose functions


def test_yours_are_shown_if_they_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(template_collectives, "broadcast", lambda x: x.fill_(3))
    assert try_yours(COLLECTIVES, "broadcast", run) == [3.0, 3.0]
    assert capsys.readouterr().out == "broadcast: you see your own.\n"


def test_the_solution_is_shown_for_a_todo(capsys: pytest.CaptureFixture[str]) -> None:
    assert try_yours(COLLECTIVES, "broadcast", run) == [7.0, 7.0]
    assert capsys.readouterr().out == "broadcast: not written yet, so you see the solution.\n"


def test_a_todo_is_one_also_where_no_world_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def todo() -> bool:
        raise NotImplementedError("Task 1.5: broadcast, see guidelines.md#15-broadcast")

    monkeypatch.setattr(template_collectives, "broadcast", todo)
    monkeypatch.setattr(collectives, "broadcast", lambda: True)
    assert try_yours(COLLECTIVES, "broadcast", lambda yours: yours())
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


def test_several_functions_are_shown_together(capsys: pytest.CaptureFixture[str]) -> None:
    names = "broadcast all_reduce_naive"
    found = try_yours(COLLECTIVES, names, lambda *both: (run(both[0]), both))
    assert found[1] == (collectives.broadcast, collectives.all_reduce_naive)
    assert capsys.readouterr().out == (
        "broadcast, all_reduce_naive: broadcast is not written yet, so you see the solution.\n"
    )


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


# What plots say


def axes() -> Axes:
    return Figure().subplots()


def legend(axes: Axes) -> list[str]:
    drawn = axes.get_legend()
    return [text.get_text() for text in drawn.get_texts()] if drawn else []


def test_curves_tell_what_was_measured_from_formulas() -> None:
    both = axes()
    named = {"a": plot.Curve([1, 2], [1, 3]), "b": plot.Curve([5, 6], [7, 8])}
    plot.curves(both, [10, 1000], named, title="T", xlabel="X", ylabel="Y")
    assert legend(both) == ["a", "b", "formula"]
    lines = [list(map(float, line.get_ydata())) for line in both.get_lines()]
    assert lines == [[1, 2], [5, 6], [1, 3], [7, 8]]
    assert [tick.get_text() for tick in both.get_xticklabels()] == ["10", "1,000"]
    assert both.get_ylim() == pytest.approx((0, 8.8))
    assert (both.get_title(), both.get_xlabel(), both.get_ylabel()) == ("T", "X", "Y")


def test_passes_carry_the_numbers_of_their_micro_batches() -> None:
    lanes = axes()
    plot.passes(lanes, [[("F0", 0.0, 1.0), ("F12.1", 1.0, 2.0)], [("B0", 2.0, 4.0)]], "title")
    assert [text.get_text() for text in lanes.texts] == ["0", "12", "0"]
    grey, first, second, third = (bars.patches[-1] for bars in lanes.containers)
    assert grey.get_width() == pytest.approx(4000)  # ms
    assert (third.get_x(), third.get_width()) == pytest.approx((2000, 2000))
    assert len({bar.get_facecolor() for bar in (first, second, third)}) == 3
    assert [tick.get_text() for tick in lanes.get_yticklabels()] == ["stage 0", "stage 1"]


def test_skipped_steps_are_marked_where_they_are() -> None:
    trace = axes()
    plot.loss_scale(trace, [8.0, 4.0, 4.0, 2.0], [True, False, True, False])
    marks = trace.get_lines()[1]
    assert list(zip(*marks.get_data(), strict=True)) == [(0, 8.0), (2, 4.0)]
    assert legend(trace) == ["scale", "skipped step"]


def test_the_parts_of_a_bar_stand_on_each_other() -> None:
    bars = axes()
    plot.stacks(bars, ["x", "y"], {"a": [1, 2], "b": [3, 4]}, [4, 7], title="T", ylabel="Y")
    upper = [(bar.get_y(), bar.get_height()) for bar in bars.containers[1]]
    assert upper == [(1, 3), (2, 4)]
    assert sorted(legend(bars)) == ["a", "b", "formula"]
