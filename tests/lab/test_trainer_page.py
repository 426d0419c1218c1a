"""docs/trainer.md matches the trainer's configuration and exit codes."""

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from distlab.production import errors
from distlab.production.config import Config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/trainer.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """Return the rows of the first table in a section, without its header."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:]]


KEYS = {key.strip("`"): (default.strip("`"), text) for key, default, text in table("All keys")}


def test_all_keys_are_there_in_their_order() -> None:
    assert [*KEYS] == [*Config.model_fields]


@pytest.mark.parametrize("key", Config.model_fields)
def test_a_default_is_right(key: str) -> None:
    found = Config().model_dump(mode="json")[key]
    assert yaml.safe_load(KEYS[key][0]) == found
    assert KEYS[key][0] == yaml.safe_dump(found, default_flow_style=True).split("\n")[0]


@pytest.mark.parametrize("key", Config.model_fields)
def test_all_choices_are_named(key: str) -> None:
    choices = [c for c in get_args(Config.model_fields[key].annotation) if isinstance(c, str)]
    named = re.findall(r"\w+", KEYS[key][1])
    assert {*choices} <= {*named}


def test_the_exit_codes_are_those_of_the_trainer() -> None:
    codes = {int(row[0]) for row in table("How it ends") if row[0].isdecimal()}
    said = {int(code) for code in re.findall(r"^(\d+) ", errors.__doc__ or "", re.MULTILINE)}
    assert codes == said == {0, 1, 69, 74, 75, 78}
