"""The messages that learners get from the judges' shared checks."""

from math import inf, nan

import pytest

from distlab.grade.checks import Wrong
from judging.checks import Text, check_refused, distance

REFUSED = {"type": "ValueError", "text": "size 0 is not above 0"}
NOTHING = {"type": "", "text": ""}
OTHER = {"type": "TypeError", "text": "no"}


PREFIXED = "rank 1: w lacks [5:9]"


def test_a_text_that_is_the_same_on_all_ranks_may_begin_with_a_rank() -> None:
    check_refused([{**REFUSED, "text": PREFIXED}] * 3, "w[2:12]", "w", "[5:9]", text="same")


def test_a_rank_names_itself_only_where_the_very_same_text_is_not_promised() -> None:
    by_rank = [{**REFUSED, "text": f"rank {rank}: 0 targets"} for rank in range(3)]
    assert "it says 'rank 1: 0 targets', but on rank 0 'rank 0: " in said(by_rank, text="same")
    check_refused(by_rank, "no batch", text="alike")
    by_rank[1]["text"] = "rank 1: 4 targets"
    assert "it says 'rank 1: 4 targets', but on" in said(by_rank, text="alike")
    check_refused(by_rank, "no batch")


def said(by_rank: list[dict[str, str]], *names: str, text: Text = "same") -> str:
    with pytest.raises(Wrong) as caught:
        check_refused(by_rank, "size = 0", *names, text=text)
    return str(caught.value)


def test_a_function_that_knows_no_ranks_is_not_told_of_any() -> None:
    assert said([NOTHING]) == "size = 0 should be a ValueError; there was none."
    assert said([OTHER]) == "size = 0 should be a ValueError; it is TypeError: 'no'."
    assert said([REFUSED], "12") == (
        "size = 0 should be a ValueError; it should name 12, and is ValueError: "
        "'size 0 is not above 0'."
    )


def test_of_several_ranks_the_one_is_named_that_differs() -> None:
    assert said([REFUSED, NOTHING]) == (
        "size = 0 should be a ValueError on every rank; on rank 1 of 2 there was none."
    )
    text = said([REFUSED, {**REFUSED, "text": "another"}])
    assert text.startswith("size = 0 should be a ValueError on every rank; on rank 1 of 2 it says ")
    text = said([REFUSED, REFUSED], "12")
    assert "on every rank; on rank 0 of 2 it should name 12, and is ValueError: " in text


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"x": [1.0]}, {"x": [1.25]}, 0.25),
        ({}, {"x": 1.0}, inf),  # a result that lacks a value is wrong
        ({"x": 1.0}, {}, inf),
        ([1.0], [1.0, 2.0], inf),
        (3, 3.5, 0.5),
        (3, 4, inf),  # counts must be equal
        (inf, inf, 0.0),
        (nan, nan, inf),
        (10**400, 1.0, inf),
        ("a", "b", inf),
    ],
)
def test_the_distance_of_two_results_is_the_same_in_both_directions(
    a: object, b: object, expected: float
) -> None:
    assert distance(a, b) == distance(b, a) == expected
