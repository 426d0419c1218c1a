"""The tests' second tier lists files that exist, and the first tier leaves out no others."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiers

HERE = tiers.TESTS / tiers.SECOND_TIER[0]


def test_the_second_tier_lists_files_that_exist() -> None:
    assert [path for path in tiers.SECOND_TIER if not (tiers.TESTS / path).exists()] == []


def config(*args: str, is_all: bool = False) -> Any:
    place = SimpleNamespace(dir=tiers.TESTS.parent)
    return SimpleNamespace(args=[*args], invocation_params=place, getoption=lambda _: is_all)


@pytest.mark.parametrize(
    ("path", "args", "is_left_out"),
    [
        (HERE, ["tests/lab"], True),
        (HERE, [f"{HERE}::test_it"], False),
        (HERE.parent, ["tests/lab"], False),
        (Path(__file__), ["tests/lab"], False),
    ],
)
def test_what_is_left_out_of_the_first_tier(path: Path, args: list[str], is_left_out: bool) -> None:
    assert tiers.is_left_out(path, config(*args)) is is_left_out
    assert not tiers.is_left_out(path, config(*args, is_all=True))


def test_one_answer_of_each_task_stays_in_the_first_tier() -> None:
    ids = [f"tests/{tiers.BANK}::test_wrong[{name}]" for name in ("1.1 a", "1.1 b", "1.11 a")]
    items: list[Any] = [SimpleNamespace(nodeid=id) for id in [*ids, "test_docs.py::test_a[1.1 a]"]]
    asked = config("tests")
    asked.hook = SimpleNamespace(pytest_deselected=lambda items: None)
    tiers.leave_out_answers(items, asked)
    assert [item.nodeid for item in items] == [ids[0], ids[2], "test_docs.py::test_a[1.1 a]"]
