"""A rebased answer keeps its own change, whatever else has changed in the solution."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from wrong_answers import rebase
from wrong_answers.changes import change_between, changed

OLD = """def mean(x):
    total = _count(x)
    total += 1

    return total / len(x)


def other():
    return 1
"""
NO_DIVISION = """-    return total / len(x)
+    return total
"""
lines = st.lists(st.sampled_from(["", "a", "b", "    c", "d = 1"]), max_size=12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lines, lines)
def test_a_difference_makes_the_one_text_of_the_other(old: list[str], new: list[str]) -> None:
    text = "\n".join(["start", *old, "end"]) + "\n"
    wanted = "\n".join(["start", *new, "end"]) + "\n"
    if text != wanted:
        assert changed(text, change_between(text, wanted)) == wanted


def test_a_change_that_still_fits_stays_as_it_is() -> None:
    new = OLD.replace("return 1", "return 2")
    assert rebase.rebased(OLD, new, NO_DIVISION, {}) == NO_DIVISION


def test_names_follow_in_what_the_answer_adds_too() -> None:
    new = OLD.replace("_count(x)", "count(x)")
    change = "-    total += 1\n+    total += _count(1)\n"
    assert rebase.rebased(OLD, new, change, {"_count": "count"}) == change.replace(
        "_count", "count"
    )


def test_a_line_that_is_now_there_twice_gets_what_stands_around_it() -> None:
    new = OLD.replace("    return 1\n", "    return total / len(x)\n")
    rebased = rebase.rebased(OLD, new, NO_DIVISION, {})
    assert rebased != NO_DIVISION
    assert changed(new, rebased).count("return total / len(x)") == 1


def test_both_changed_the_same_line() -> None:
    new = OLD.replace("total / len(x)", "total / max(1, len(x))")
    with pytest.raises(rebase.Conflict):
        rebase.rebased(OLD, new, NO_DIVISION, {})


def test_a_solution_that_is_now_what_the_answer_was_is_a_conflict() -> None:
    new = OLD.replace("    return total / len(x)\n", "    return total\n")
    with pytest.raises(rebase.Conflict, match="is now what the change made of it"):
        rebase.rebased(OLD, new, NO_DIVISION, {})


def test_a_change_that_another_answer_contains_is_replaced_in_its_own_table_alone() -> None:
    table = "[wrong.{}]\nchange = '''\n{}'''\n"
    longer = table.format("longer", NO_DIVISION + "+    # and more\n")
    bank = longer + table.format("short", NO_DIVISION)
    now = rebase.replaced(bank, "short", NO_DIVISION, "+    pass\n")
    assert now == longer + table.format("short", "+    pass\n")
