"""examples/museum: the simulator says about each public bug what the table in README.md shows."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from distlab.cli import main

ROOT = Path(__file__).parents[3]
MUSEUM = ROOT / "examples/museum"
PROGRAMS = sorted(MUSEUM.glob("*.py"))
LINK = r"\[.+\]\(https://github\.com/(.+)\)"
ROW = rf"^\| \[`(\w+)`\]\(\1\.py\) \| (.+) \| {LINK} \| (.+) \| `(.+)` \|$"


@dataclass(frozen=True)
class Exhibit:
    """A row of the table: what a program is about, and what the simulator says of it."""

    name: str
    mistake: str
    source: str
    on_gloo: str
    verdict: str

    def docstring(self) -> str:
        """Return the start of the program's docstring, with one blank between words."""
        source = re.sub(r"/(?:issues|pull)/", "#", self.source)
        return f'"""{self.mistake}. Retold from {source}. On gloo, {self.on_gloo}.'

    def pattern(self) -> str:
        """Return a regular expression for the verdict, in which "…" stands for any text."""
        return ".*?".join(re.escape(part.strip()) for part in self.verdict.split("…"))


TABLE = (MUSEUM / "README.md").read_text(encoding="utf-8")
EXHIBITS = [Exhibit(*row) for row in re.findall(ROW, TABLE, flags=re.MULTILINE)]
each_exhibit = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)


def test_the_table_has_a_row_for_every_program() -> None:
    assert sorted(exhibit.name for exhibit in EXHIBITS) == [program.stem for program in PROGRAMS]


@each_exhibit
def test_a_program_says_of_itself_what_the_table_says(exhibit: Exhibit) -> None:
    said = " ".join((MUSEUM / f"{exhibit.name}.py").read_text(encoding="utf-8").split())
    assert said.startswith(exhibit.docstring())


@each_exhibit
def test_the_simulator_finds_the_mistake(
    exhibit: Exhibit, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    program = (MUSEUM / f"{exhibit.name}.py").read_text(encoding="utf-8")
    (command,) = re.findall(r"^distlab (sim .+)$", program, flags=re.MULTILINE)
    with pytest.raises(SystemExit) as left:
        main(shlex.split(command))
    printed = " ".join("".join(capfd.readouterr()).split())
    assert re.search(exhibit.pattern(), printed), f"it printed\n{printed}"
    assert left.value.code == 1
