"""Boxes "In PyTorch today" quote whole lines that programs of examples/in_pytorch print.

Those of Phases 3 and 4 quote numbers, which ``test_in_pytorch_34`` compares.
"""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from test_in_pytorch_34 import PRINTED

from distlab.cli import main

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[3]
PROGRAMS = sorted((ROOT / "examples/in_pytorch").glob("*.py"))
SHARED = "lesson"
COMMAND = r"`(distlab sim [^`\n]*examples/in_pytorch/\w+\.py)`"
MAX_LINES = 5

each_program = pytest.mark.parametrize(
    "program",
    [p for p in PROGRAMS if p.stem != SHARED and p.stem not in PRINTED],
    ids=lambda program: program.stem,
)


@cache
def boxes() -> list[str]:
    """Return the boxes of all guidelines, each with a table and the paragraph after it, if any."""
    found = []
    for text in (page.read_text(encoding="utf-8") for page in ROOT.glob("phase*/guidelines.md")):
        found += re.findall(
            r"^(\*\*In PyTorch today\.\*\*.*?)\n\n(?=\*\*Further reading\.\*\*)",
            text,
            re.MULTILINE | re.DOTALL,
        )
    return found


def quoted(box: str) -> list[str]:
    """Return the lines of output that a box quotes: spans with a colon and a blank."""
    spans = re.findall(r"`([^`]+)`", box)
    return [span for span in spans if re.match(r"[\w', =]+: \S", span) and "{" not in span]


def test_boxes_are_short_and_stand_before_the_further_reading() -> None:
    texts = [page.read_text(encoding="utf-8") for page in ROOT.glob("phase*/guidelines.md")]
    assert sum(text.count("**In PyTorch today.**") for text in texts) == len(boxes()) > 0
    for paragraph in (part for box in boxes() for part in box.split("\n\n")):
        assert paragraph.startswith("|") or len(paragraph.splitlines()) <= MAX_LINES, paragraph


@each_program
def test_a_program_prints_what_the_boxes_quote(
    program: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"^distlab (sim .+)$", program.read_text(), flags=re.MULTILINE)
    about = [box for box in boxes() if f"distlab {command}" in re.findall(COMMAND, box)]
    assert about, f"no box has the command: distlab {command}"
    lines = [line for box in about for line in quoted(box)]
    assert lines
    with pytest.raises(SystemExit) as left:
        main(shlex.split(command))
    printed = capfd.readouterr().out
    assert left.value.code == 0, printed
    assert [line for line in lines if f"{line}\n" not in printed] == [], printed
