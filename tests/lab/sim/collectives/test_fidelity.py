"""docs/fidelity.md shows the model's times, and nine in ten of them meet the accuracy goals."""

from statistics import median

import fidelity
import pytest

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
