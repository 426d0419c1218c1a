"""What the judges' shared checks say to a learner."""

import pytest

from distlab.grade.checks import Wrong
from judging.checks import check_refused

REFUSED = {"type": "ValueError", "text": "size 0 is not above 0"}
NOTHING = {"type": "", "text": ""}
OTHER = {"type": "TypeError", "text": "no"}


def said(by_rank: list[dict[str, str]], *names: str) -> str:
    with pytest.raises(Wrong) as caught:
        check_refused(by_rank, "size = 0", *names)
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
