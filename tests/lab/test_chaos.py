"""distlab chaos: a correct writer survives its campaigns, and every kind of wrong one is caught."""

from pathlib import Path
from tempfile import mkdtemp
from textwrap import dedent, indent

import pytest
from typer.testing import CliRunner

from distlab import chosen
from distlab.chaos import campaigns, kills
from distlab.chaos.corruptions import KINDS, Corruptions
from distlab.chaos.kills import Kills
from distlab.chaos.victim import Left, Training
from distlab.cli.app import app
from distlab.grade.submission import Submission

WRITER = """

_right_save, _right_load = save_checkpoint, load_checkpoint


def save_checkpoint(state, folder, step, *, keep=3):
{save}


def load_checkpoint(folder):
{load}
"""
SOLUTION = Path(__file__).parents[2] / "solutions" / "phase4_production" / "checkpoint.py"
SAVE, LOAD = (
    "return _right_save(state, folder, step)",
    "return _right_load(folder)",
)
IN_PLACE = """
        path = _right_save(state, folder, step)
        import time

        content = (path / "state.pt").read_bytes()
        with open(path / "state.pt", "wb") as file:
            file.write(content[:1000])
            file.flush()
            time.sleep(0.5)
            file.write(content[1000:])
        return path
"""
UNCHECKED = """
        for path in sorted(folder.glob("step-*"), reverse=True):
            try:
                state = torch.load(path / "state.pt", weights_only=True)
            except Exception:
                continue
            return Loaded(int(path.name[5:]), state, path, {})
        return None
"""


def writer(tmp_path: Path, save: str = SAVE, load: str = LOAD) -> Submission:
    lesson = tmp_path / "hand-in" / "phase4_production" / "checkpoint.py"
    lesson.parent.mkdir(parents=True)
    bodies = [indent(dedent(body).strip(), "    ") for body in (save, load)]
    lesson.write_text(SOLUTION.read_text() + WRITER.format(save=bodies[0], load=bodies[1]))
    return Submission(tmp_path / "hand-in")


def killed(tmp_path: Path, lessons: Submission, count: int) -> Kills:
    training = Training(lessons, tmp_path / "run", num_steps=40, save_every=4)
    return kills.run(training, count, 0, tmp_path / "scratch", lambda: None)


def damaged(tmp_path: Path, lessons: Submission, count: int) -> Corruptions:
    tmp_path.mkdir(exist_ok=True)
    return campaigns.damage(lessons, count, 0, tmp_path, lambda number: None)


@pytest.mark.slow
def test_the_solution_survives_kills(tmp_path: Path) -> None:
    results = killed(tmp_path, chosen.SOLVED, 2)
    assert not results.failures
    assert results.kills == len(results.lost_steps) == 2
    assert results.inside_saves >= 1
    assert results.ended >= 1


@pytest.mark.slow
def test_kills_find_a_wrong_writer(tmp_path: Path) -> None:
    training = Training(writer(tmp_path, IN_PLACE), tmp_path / "run", num_steps=8, save_every=4)
    results = kills.run(training, 12, 0, tmp_path / "scratch", lambda: None)
    assert results.failures
    assert "damaged checkpoint has its final name" in results.failures[0]


@pytest.mark.parametrize(
    ("left", "problem"),
    [
        (Left(8, "b"), ""),
        (Left(12, "c"), ""),  # killed after saving step 12, before reporting it
        (Left(error="OSError: no"), "load_checkpoint raises OSError: no"),
        (Left(4, "a"), "step 8 is gone, which was saved: step 4 is found"),
        (Left(), "step 8 is gone, which was saved: nothing is found"),
        (Left(8, "b", "step-12: short"), "a damaged checkpoint has its final name: step-12: short"),
        (Left(8, "x"), "step 8 is not that of the undisturbed training, bit for bit"),
    ],
)
def test_a_checkpoint_that_is_left_is_judged(left: Left, problem: str) -> None:
    assert kills.problem_of(left, 8, {4: "a", 8: "b", 12: "c"}) == problem


def test_the_solution_notices_all_corruptions_and_a_seed_repeats_them(tmp_path: Path) -> None:
    results = damaged(tmp_path / "1", chosen.SOLVED, 50)
    assert not results.failures
    assert set(results.by_kind) == set(KINDS)
    assert sum(results.by_kind.values()) == 50
    assert damaged(tmp_path / "2", chosen.SOLVED, 50) == results


def test_the_command_reports_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(campaigns, "mkdtemp", lambda prefix: mkdtemp(prefix=prefix, dir=tmp_path))
    result = CliRunner().invoke(app, ["chaos", "--kills", "0", "--corruptions", "10"])
    assert result.exit_code == 0, result.output
    assert "10 corruptions" in result.output
    assert "all noticed" in result.output
    assert not list(tmp_path.iterdir())


def test_the_command_names_the_damage_that_was_not_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lessons = writer(tmp_path, load=UNCHECKED)
    monkeypatch.setattr(campaigns, "mkdtemp", lambda prefix: mkdtemp(prefix=prefix, dir=tmp_path))
    monkeypatch.setattr(campaigns, "SHOWN", 100)
    monkeypatch.setattr(chosen, "find", lambda impl, tasks: lessons)
    result = CliRunner().invoke(app, ["chaos", "--kills", "0", "--corruptions", "60"])
    assert result.exit_code == 1
    for kind in ("a flipped bit", "a file of an older step", "files swapped between steps"):
        assert f"distlab chaos: {kind}: " in result.output
    left = next(tmp_path.glob("distlab-chaos-*"))
    assert str(left) in result.output
