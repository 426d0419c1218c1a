"""distlab chaos: a right writer survives its campaigns, and each kind of wrong one is noticed."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from textwrap import dedent, indent

import pytest
from processes import end_fork_server
from typer.testing import CliRunner

from distlab import chosen
from distlab.chaos import corruptions, kills, processes
from distlab.chaos.corruptions import KINDS, Corruptions
from distlab.chaos.kills import Kills
from distlab.chaos.victim import Training
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
            time.sleep(0.05)
            file.write(content[1000:])
        return path
"""
FORGETFUL = """
        found = _right_load(folder)
        if found is not None:
            for moments in found.state["optimizer"]["state"].values():
                moments["exp_avg"].zero_()
        return found
"""
UNLINKS_FIRST = """
        import time

        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)
        return _right_save(state, folder, step)
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


@pytest.fixture(autouse=True, scope="module")
def no_fork_server_stays() -> Iterator[None]:
    yield
    end_fork_server()


def writer(tmp_path: Path, save: str = SAVE, load: str = LOAD) -> Submission:
    lesson = tmp_path / "hand-in" / "phase4_production" / "checkpoint.py"
    lesson.parent.mkdir(parents=True)
    bodies = [indent(dedent(body).strip(), "    ") for body in (save, load)]
    lesson.write_text(SOLUTION.read_text() + WRITER.format(save=bodies[0], load=bodies[1]))
    return Submission(tmp_path / "hand-in")


def killed(tmp_path: Path, lessons: Submission, count: int) -> Kills:
    scratch = tmp_path / "scratch"
    training = Training(lessons, tmp_path / "run", num_steps=40, save_every=4)
    return kills.run(training, count, 0, scratch, lambda: None)


def damaged(tmp_path: Path, lessons: Submission, count: int) -> Corruptions:
    scratch = tmp_path / "damage"
    return processes.call(corruptions.run, lessons, count, 0, scratch, advance=lambda: None)


@pytest.mark.slow
def test_the_solution_survives_kills(tmp_path: Path) -> None:
    found = killed(tmp_path, chosen.SOLVED, 6)
    assert not found.failures
    assert found.kills == 6
    assert found.inside_saves >= 2
    assert found.ended >= 1
    assert len(found.lost_steps) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "load", "expected"),
    [
        (IN_PLACE, LOAD, "damaged checkpoint has its final name"),
        (UNLINKS_FIRST, LOAD, "is gone, which was saved"),
        (SAVE, FORGETFUL, "not that of the undisturbed training"),
    ],
    ids=["writes in place", "unlinks first", "loads without the moments"],
)
def test_kills_find_a_wrong_writer(save: str, load: str, expected: str, tmp_path: Path) -> None:
    found = killed(tmp_path, writer(tmp_path, save, load), 12)
    assert found.failures
    assert expected in found.failures[0]


def test_the_solution_notices_all_corruptions(tmp_path: Path) -> None:
    found = damaged(tmp_path, chosen.SOLVED, 70)
    assert not found.failures
    assert set(found.by_kind) == set(KINDS)
    assert sum(found.by_kind.values()) == 70


def test_a_loader_that_checks_nothing_is_noticed(tmp_path: Path) -> None:
    found = damaged(tmp_path, writer(tmp_path, load=UNCHECKED), 70)
    noticed = {failure.partition(":")[0] for failure in found.failures}
    assert {"a flipped bit", "a file of an older step", "files swapped between steps"} <= noticed


def test_the_same_seed_does_the_same_damage(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    first = damaged(tmp_path / "1", chosen.SOLVED, 20)
    assert damaged(tmp_path / "2", chosen.SOLVED, 20) == first


def test_the_command_reports_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "distlab.chaos.campaigns.mkdtemp", lambda prefix: mkdtemp(prefix=prefix, dir=tmp_path)
    )
    result = CliRunner().invoke(app, ["chaos", "--kills", "0", "--corruptions", "10"])
    assert result.exit_code == 0, result.output
    assert "10 corruptions" in result.output
    assert "all noticed" in result.output
    assert not list(tmp_path.iterdir())


def test_the_command_names_what_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lessons = writer(tmp_path, load=UNCHECKED)
    monkeypatch.setattr(
        "distlab.chaos.campaigns.mkdtemp", lambda prefix: mkdtemp(prefix=prefix, dir=tmp_path)
    )
    monkeypatch.setattr(chosen, "find", lambda impl, tasks: lessons)
    result = CliRunner().invoke(app, ["chaos", "--kills", "0", "--corruptions", "30"])
    assert result.exit_code == 1
    assert "files swapped between steps" in result.output
    left = next(tmp_path.glob("distlab-chaos-*"))
    assert str(left) in result.output
