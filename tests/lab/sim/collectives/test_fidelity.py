"""docs/fidelity.md is true: its tables are those of the model, and nine in ten errors are small."""

import csv
from dataclasses import replace
from statistics import median

import fidelity
import pytest

from distlab.sim.hardware.presets import CLUSTERS

TABLES = fidelity.tables()


def test_the_page_shows_what_the_model_says() -> None:
    text = fidelity.PAGE.read_text(encoding="utf-8")
    assert fidelity.written(text) == text


@pytest.mark.parametrize("goal", fidelity.GOALS, ids=lambda goal: goal.text)
def test_of_the_points_that_were_not_fitted_nine_in_ten_meet_the_goal(goal: fidelity.Goal) -> None:
    points = goal.points(table for table in TABLES if not table.is_fitted)
    errors = [abs(fidelity.simulated_s(table, n) / seconds - 1) for table, n, seconds in points]
    assert sum(error <= goal.within for error in errors) >= 0.9 * len(errors)
    assert median(errors) <= 0.1


def test_every_figure_has_a_source_and_every_source_says_where() -> None:
    with (fidelity.FIGURES / "sources.csv").open() as file:
        sources = {row["source"]: row for row in csv.DictReader(file)}
    with (fidelity.FIGURES / "figures.csv").open() as file:
        assert {row["source"] for row in csv.DictReader(file)} == set(sources)
    assert all(len(row["where"]) > 10 and row["preset"] in CLUSTERS for row in sources.values())


def test_a_table_of_another_machine_fits_worse() -> None:
    """The comparison can fail: A100s are not H100s."""
    table = next(table for table in TABLES if table.source == "llmb-dgxh100-1n")
    a100 = next(table for table in TABLES if table.source == "stas00-a100-1n")
    wrong = replace(table, cluster=a100.cluster)
    assert median(map(abs, wrong.errors())) > 5 * median(map(abs, table.errors()))
