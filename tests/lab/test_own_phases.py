"""A custom phase, added as docs/grading.md describes."""

import shutil
from pathlib import Path

import pytest
from commands import ROOT, distlab
from own_phases import copy_shipped, shipped

from distlab import course

pytestmark = pytest.mark.usefixtures("forked")

PHASE = """
[[phase]]
number = 99
title = "Our own"
folder = "phase99_ours"

[[phase.lesson]]
name = "warm_up"
title = "Warming up"

[[phase.lesson.task]]
id = "99.1"
function = "count_ranks"
title = "Count the ranks"
points = 7
minutes = 5
difficulty = 1
"""
HEAD = "import torch\nimport torch.distributed as dist\n\n\ndef count_ranks():\n"
TODO = '"Task 99.1: count_ranks, see guidelines.md#991-count-the-ranks"'
RIGHT = "    one = torch.ones(1)\n    dist.all_reduce(one)\n    return int(one)\n"
SUITE = """
from distlab.grade import check, task

@task("99.1")
def test_every_rank_counts_all(grade):
    check(grade.run(count, 3).results == [3, 3, 3], "Three ranks should return 3.")

def count(lesson):
    return lesson.count_ranks()
"""


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Add a phase to a copy of the course; return the path of the phase's template."""
    copy_shipped(ROOT, tmp_path)
    with (tmp_path / "course.toml").open("a") as file:
        file.write(PHASE)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in ("phase99_ours", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tests/test_phase99.py").write_text(SUITE)
    template = tmp_path / "phase99_ours/template_warm_up.py"
    template.write_text(f"{HEAD}    raise NotImplementedError({TODO})\n")
    monkeypatch.chdir(tmp_path)
    return template


def test_the_commands_know_it(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert distlab("check", "99.1") == 1
    assert "99.1 count_ranks: not written yet" in capsys.readouterr().out
    ours.write_text(HEAD + RIGHT)
    assert distlab("check", "99.1") == 0
    assert "99.1 count_ranks: passed (7/7 points, " in capsys.readouterr().out
    assert distlab("status") == 0
    assert "1/1 tasks  7/7 points" in capsys.readouterr().out


def test_the_rules_of_form_leave_it_out(ours: Path) -> None:
    found = course.load(ours.parents[1])
    assert [phase.number for phase in found.phases][-1] == 99
    assert shipped(found) == shipped(course.load(ROOT))
