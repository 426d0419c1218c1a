"""The students' copy of the course, and training with what a learner has written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distlab.cli import main
from distlab.course import load
from distlab.learner import handout
from distlab.learner.folder import CourseFolder, LearnerError

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[2]
COURSE = load(ROOT)
PHASE = "phase1_data_parallel"
LESSONS = ("data_loader", "collectives", "trainer")


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("handout") / "course"
    handout.write(CourseFolder(ROOT, COURSE), target)
    return target


def distlab(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command of a copy of the course, in it."""
    return subprocess.run(
        [sys.executable, "-m", "distlab", *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def solve(root: Path, *lessons: str) -> None:
    """Write lessons as the solutions do."""
    for lesson in lessons:
        text = (ROOT / "solutions" / PHASE / f"{lesson}.py").read_text()
        text = text.replace(f"from solutions.{PHASE}.", f"from {PHASE}.template_")
        (root / PHASE / f"template_{lesson}.py").write_text(text)


@pytest.fixture
def mine(students: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(students, tmp_path / "mine"))


# The handout


def test_a_handout_holds_no_answer(students: Path) -> None:
    assert (students / "course.toml").is_file()
    for name in ("solutions", "scripts", ".git", "tests/lab", "tests/wrong_answers"):
        assert not (students / name).exists(), name


def test_a_handout_has_a_readme_of_its_own(students: Path) -> None:
    text = (students / "README.md").read_text()
    assert "make demo" not in text, "it needs the solutions"
    assert "students' version" in text
    assert "solutions/" not in text


def test_make_test_grades_the_templates_of_a_handout(students: Path) -> None:
    (students / ".venv").mkdir(exist_ok=True)
    (students / ".venv/.ready").touch()  # nothing is to be installed
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "test"],
        cwd=students,
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("MAKE")},
    )
    suites = " ".join(f"tests/test_phase{phase.number}.py" for phase in COURSE.phases)
    assert done.stdout.splitlines() == [f".venv/bin/python -m pytest {suites}"]


@pytest.mark.parametrize("more", ["", "\ndef broken(:\n"], ids=["solved", "does not parse"])
def test_a_solved_open_task_is_not_handed_out(tmp_path: Path, more: str) -> None:
    course = tmp_path / "course"
    for phase in COURSE.phases:
        shutil.copytree(ROOT / phase.folder, course / phase.folder)
    shutil.copy(ROOT / "course.toml", course)
    shutil.copy(ROOT / "README.md", course)
    here = CourseFolder(course, COURSE)
    handout.write(here, tmp_path / "unsolved")
    solution = (ROOT / "solutions" / PHASE / "challenge.py").read_text()
    (course / PHASE / "template_challenge.py").write_text(solution + more)
    with pytest.raises(
        LearnerError, match=r"fast_all_reduce in .*template_challenge\.py is solved"
    ):
        handout.write(here, tmp_path / "solved")
    assert not (tmp_path / "solved").exists()


def test_nothing_offers_what_a_handout_has_not_got(mine: Path) -> None:
    solve(mine, "collectives")
    assert "distlab diff" not in distlab(mine, "check", "1.4").stdout
    done = distlab(mine, "diff", "1.4")
    assert done.returncode == 2
    assert "comes without solutions/" in done.stderr
    done = distlab(mine, "diff", "1.1")
    assert done.stderr == "1.1 has not passed yet: distlab check 1.1\n"
    done = distlab(mine, "trace", "1.4", "--impl", "solution")
    assert done.returncode == 2
    assert "--impl solution: this copy of the course comes without solutions/" in done.stderr


def test_grading_works_in_a_handout(mine: Path) -> None:
    solve(mine, "collectives")
    assert distlab(mine, "check", "1.4").returncode == 0
    report = mine / "report.json"
    done = distlab(mine, "grade", "--backend", "sim", "--report", f"json={report}")
    assert done.returncode == 1
    outcomes = {task["id"]: task["outcome"] for task in json.loads(report.read_text())["tasks"]}
    solved = ("1.4", "1.5", "1.6", "1.7", "1.8")
    assert outcomes == {t.id: "passed" if t.id in solved else "todo" for t in COURSE.tasks}


@pytest.mark.parametrize("command", ["train", "demo", "bench all_reduce", "bench pipeline"])
def test_what_needs_the_solutions_says_so_in_a_line(students: Path, command: str) -> None:
    done = distlab(students, *command.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "no solutions/: --impl mine takes what you have written" in done.stderr


def test_a_benchmark_of_phase_2_measures_what_is_written(mine: Path) -> None:
    benchmark = ("bench", "memory", "--layers", "2", "--repeats", "1", "--impl", "mine")
    done = distlab(mine, *benchmark)
    assert (done.returncode, done.stdout) == (1, "")
    assert "2.6 checkpoint, 2.7 checkpoint_sequential. Go on with: distlab check 2.6" in done.stderr
    lesson = "activation_checkpointing.py"
    solution = ROOT / "solutions/phase2_advanced" / lesson
    shutil.copy(solution, mine / "phase2_advanced" / f"template_{lesson}")
    done = distlab(mine, *benchmark)
    assert done.returncode == 0, done.stderr
    assert "│ torch's checkpoint_sequential │" in done.stdout


def test_the_doctor_needs_no_solutions(students: Path) -> None:
    done = distlab(students, "doctor")
    assert done.returncode == 0, done.stderr
    assert "8 simulated GPUs" in done.stdout


def test_a_diff_without_solutions_is_a_line(students: Path) -> None:
    done = distlab(students, "diff", "1.4", "--spoil")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "comes without solutions/ to compare with" in done.stderr


@pytest.mark.parametrize("target", ["inside", "full"])
def test_a_handout_overwrites_nothing(target: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    place = ROOT / "students" if target == "inside" else tmp_path
    with pytest.raises(
        LearnerError, match="lies inside the course" if target == "inside" else "is not empty"
    ):
        handout.write(CourseFolder(ROOT, COURSE), place)


def test_nobody_s_answer_is_handed_out(mine: Path, tmp_path: Path) -> None:
    solve(mine, "collectives")
    with pytest.raises(LearnerError, match=r"exchange in .* is written.*distlab reset 1\.4"):
        handout.write(CourseFolder(mine, COURSE), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_no_part_of_an_answer_is_handed_out(mine: Path, tmp_path: Path) -> None:
    path = mine / COURSE.task("2.9").template
    path.write_text(path.read_text().replace('"Task 2.9: send_tensors, ', '"written, '))
    with pytest.raises(LearnerError, match=r"send_tensors in .* is written.*distlab reset 2\.9"):
        handout.write(CourseFolder(mine, COURSE), tmp_path / "new")


# Training with what was written

SHORT = ["--num-workers", "2", "--epochs", "1"]


def test_the_learner_s_own_trainer_trains_as_the_solution_s(
    mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    solve(mine, *LESSONS)
    text = (mine / PHASE / "template_trainer.py").read_text()
    own = text.replace('f"epoch {result.epoch}', 'f"my own epoch {result.epoch}')
    (mine / PHASE / "template_trainer.py").write_text(own)
    done = distlab(mine, "train", "--impl", "mine", *SHORT, "--all-reduce", "naive")
    assert done.returncode == 0, done.stderr
    assert "rank 0/2  my own epoch 1  loss " in done.stdout
    with pytest.raises(SystemExit):
        main(["train", *SHORT, "--all-reduce", "naive"])
    assert capfd.readouterr().out.splitlines()[-1] == done.stdout.splitlines()[-1]


def test_a_trainer_that_does_not_parse_is_named_without_frames_of_ours(mine: Path) -> None:
    solve(mine, *LESSONS)
    path = mine / PHASE / "template_trainer.py"
    path.write_text(path.read_text() + "\ndef after(:\n")
    done = distlab(mine, "train", "--impl", "mine", *SHORT)
    assert (done.returncode, done.stdout) == (1, "")
    assert "template_trainer.py" in done.stderr.splitlines()[0]
    assert "invalid syntax" in done.stderr
    assert "distlab/" not in done.stderr


def test_a_trainer_that_is_not_written_is_a_line_that_names_the_tasks(mine: Path) -> None:
    solve(mine, "data_loader")
    done = distlab(mine, "train", "--impl", "mine", *SHORT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "this needs what you have not written yet: 1.5 broadcast, 1.9 broadcast_parameters, "
        "1.10 average_gradients and average_gradients_flat, 1.11 train_step, 1.12 evaluate, "
        "1.13 Trainer.fit. "
        "Go on with: distlab check 1.5\n"
    )
    done = distlab(mine, "train", "--impl", "mine", *SHORT, "--all-reduce", "recursive_doubling")
    assert "the 8 tasks 1.4, 1.5, 1.7, 1.9, 1.10, 1.11, 1.12 and 1.13. " in done.stderr
