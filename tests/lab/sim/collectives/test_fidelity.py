"""docs/fidelity.md is true: its tables are those of the model, its constants those of the fit."""

import csv
from dataclasses import replace
from statistics import median

import fidelity
import fidelity_fit
import pytest

from distlab.sim.hardware.presets import CLUSTERS, GPUS, PROTOCOLS, Number

TABLES = fidelity.tables()
FIELDS = {"launch_us": "launch_s"}


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


def test_the_constants_are_those_of_the_fit() -> None:
    half = [(table, list(fidelity_fit.ways(table))) for table in TABLES if table.is_fitted]
    found = fidelity_fit.fit(lambda c: fidelity_fit.error(c, half) + fidelity_fit.pull(c))
    checked = 0
    for kind, values in found.items():
        for name, value in values.items():
            number = constant(kind, name)
            assert number.status == "fitted", (kind, name)
            assert _shipped(kind, name) == pytest.approx(value, rel=0.01), (kind, name)
            checked += 1
    assert f"{checked} constants" in fidelity.PAGE.read_text()


def test_the_fit_and_the_tuner_have_the_same_formula() -> None:
    shipped = {
        kind: {name: _shipped(kind, name) for name in values}
        for kind, values in fidelity_fit.START.items()
    }
    others = [table for table in TABLES if (table.algorithm, table.nodes) != ("tree", 1)]
    assert len(TABLES) - len(others) == 1  # a tree on one node: the page says what stands for it
    for table in others:
        lines = [way.line(shipped) for way in fidelity_fit.ways(table)]
        for num_bytes, _ in table.points:
            fitted_s = min(start_s + num_bytes * byte_s for start_s, byte_s in lines)
            assert fitted_s == pytest.approx(fidelity.simulated_s(table, num_bytes)), table.source


def _shipped(kind: str, name: str) -> float:
    return constant(kind, name).value * (1e6 if kind.endswith("_us") else 1)


def constant(kind: str, name: str) -> Number:
    """Return the preset's number that the fit calls so."""
    if kind.startswith("efficiency"):
        gpu = {"A100": "A100-80GB", "H100": "H100-80GB", "B200": "B200-180GB"}[kind.split()[1]]
        return GPUS[gpu][f"protocol_efficiency.{name}"]
    if kind == "net_latency_us":
        return CLUSTERS[name].net_latency_s
    number = getattr(PROTOCOLS[name], FIELDS.get(kind, kind))
    assert isinstance(number, Number)
    return number
