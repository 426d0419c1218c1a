"""The student's copy of the course works, and has neither answers nor links that lead out of it."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import test_docs
from commands import COURSE, PHASE, ROOT

from distlab.learner import handout
from distlab.learner.folder import CourseFolder, LearnerError
from distlab.learner.source import defined

pytestmark = pytest.mark.usefixtures("forked")

NUM_LINES = 4  # this many equal lines in a row are no coincidence
NAMES_ALL = "AGENTS.md"  # names the files that assistants must not read
HERE = CourseFolder(ROOT, COURSE)
SHORT = ["--impl", "mine", "--num_gpus", "2", "--epochs", "1"]


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("handout") / "course"
    handout.write(HERE, target)
    return target


@pytest.fixture
def mine(students: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(students, tmp_path / "mine"))


def distlab(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run ``distlab`` from a copy of the course, in the folder of that copy."""
    return subprocess.run(
        [sys.executable, "-m", "distlab", *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )


def solve(root: Path, *lessons: str) -> None:
    """Fill in lessons with their solutions."""
    for lesson in lessons:
        text = (ROOT / "solutions" / PHASE / f"{lesson}.py").read_text()
        text = text.replace(f"from solutions.{PHASE}.", f"from {PHASE}.template_")
        (root / PHASE / f"template_{lesson}.py").write_text(text)


# --- no answers ----------------------------------------------------------------------------------

Block = tuple[str, ...]


def code_lines(text: str) -> list[str]:
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def blocks(lines: Sequence[str]) -> Iterator[Block]:
    return (tuple(lines[k : k + NUM_LINES]) for k in range(len(lines) - NUM_LINES + 1))


def bodies(path: Path) -> dict[str, str]:
    """Return the bodies of all functions in a file, without docstrings."""
    text = path.read_text()
    texts = {}
    for name, node in defined(ast.parse(text)):
        body = node.body[1:] if ast.get_docstring(node) else node.body
        first = body[0].lineno - 1 if body else node.end_lineno
        texts[name] = "\n".join(text.splitlines()[first : node.end_lineno])
    return texts


def answers() -> dict[Block, str]:
    """Return the blocks of code that only solutions contain, and the function each is from."""
    found = {}
    for template in sorted(ROOT.glob("phase*/template_*.py")):
        lesson = template.name.removeprefix("template_")
        solution, given = ROOT / "solutions" / template.parent.name / lesson, bodies(template)
        for name, body in bodies(solution).items():
            own = re.sub(r"solutions\.(phase\w+)\.", r"\1.template_", body)
            if given.get(name) != own:
                found |= dict.fromkeys(blocks(code_lines(body)), f"{solution.name}: {name}")
    return found


def given_away(folder: Path) -> list[str]:
    """Return where files in a folder contain blocks of a solution."""
    own = answers()
    return [
        f"{file.relative_to(folder)} has lines of {own[block]}"
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        for block in blocks(code_lines(file.read_text(errors="replace")))
        if block in own
    ]


def test_no_block_of_a_solution_is_in_any_file(students: Path) -> None:
    assert given_away(students) == []


# --- no surplus files ----------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["inside", "full"])
def test_a_handout_overwrites_nothing(target: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    place = ROOT / "students" if target == "inside" else tmp_path
    reason = "lies inside the course" if target == "inside" else "is not empty"
    with pytest.raises(LearnerError, match=reason):
        handout.write(HERE, place)


@pytest.mark.parametrize(
    ("template", "old", "new", "reason"),
    [
        ("1.3", None, None, r"exchange in .* is written.*distlab reset 1\.3"),
        ("2.8", '"Task 2.8: send_tensors, ', '"written, ', r"send_tensors in .* is written"),
    ],
)
def test_an_answer_of_a_learner_is_not_handed_out(
    mine: Path, tmp_path: Path, template: str, old: str | None, new: str | None, reason: str
) -> None:
    path = mine / COURSE.task(template).template
    if old and new:
        path.write_text(path.read_text().replace(old, new))
    else:
        solve(mine, "collectives")
    with pytest.raises(LearnerError, match=reason):
        handout.write(CourseFolder(mine, COURSE), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("more", ["", "\ndef broken(:\n"], ids=["solved", "does not parse"])
def test_a_solved_open_task_is_not_handed_out(mine: Path, tmp_path: Path, more: str) -> None:
    solution = (ROOT / "solutions" / PHASE / "challenge.py").read_text()
    (mine / PHASE / "template_challenge.py").write_text(solution + more)
    with pytest.raises(
        LearnerError, match=r"fast_all_reduce in .*template_challenge\.py is solved"
    ):
        handout.write(CourseFolder(mine, COURSE), tmp_path / "solved")
    assert not (tmp_path / "solved").exists()


# --- pages ---------------------------------------------------------------------------------------

_LEFT_OUT = "|".join(re.escape(name) for name in handout.LEFT_OUT)
NAMED = re.compile(rf"(?<![\w-])({_LEFT_OUT})(?=/\w|\.py|`|\))")


def test_no_page_names_or_links_what_was_left_out(
    students: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_docs, "ROOT", students)
    pages = sorted(students.rglob("*.md"))
    assert len(pages) > 5
    for page in pages:
        text = page.read_text()
        assert test_docs.broken_links(text, page) == [], page
        names = NAMED.findall(text.replace("/`", "`"))
        assert names == [] or page.name == NAMES_ALL, page


def test_the_readme_of_a_handout_leads_to_every_page_of_docs(students: Path) -> None:
    readme = (students / "README.md").read_text()
    assert [p.name for p in students.glob("docs/*.md") if f"](docs/{p.name}" not in readme] == []


# --- the copy works ------------------------------------------------------------------------------


def test_make_test_grades_the_templates_of_a_handout(students: Path) -> None:
    (students / ".venv").mkdir(exist_ok=True)
    (students / ".venv/.ready").touch()  # tells make that nothing needs installing
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "test"],
        cwd=students,
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("MAKE")},
    )
    suites = " ".join(f"tests/test_phase{phase.number}.py" for phase in COURSE.phases)
    assert done.stdout.splitlines() == [f".venv/bin/python -m pytest {suites}"]


def test_grading_works_in_a_handout_and_offers_no_solutions(mine: Path) -> None:
    solve(mine, "collectives")
    done = distlab(mine, "check", "1.3", "1.9")
    assert "✔ 1.3 exchange: passed" in done.stdout
    assert "· 1.9 broadcast_parameters: " in done.stdout
    assert "distlab diff" not in done.stdout


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("diff 1.3 --spoil", 2, "comes without solutions/ to compare with"),
        ("diff 1.1", 2, "1.1 has not passed yet: distlab check 1.1\n"),
        ("trace 1.3 --impl solution", 2, "this copy of the course comes without solutions/"),
        ("train", 78, "no solutions/: --impl mine takes what you have written"),
        ("demo", 1, "no solutions/: train what you have written with distlab train --impl mine"),
        ("bench pipeline", 1, "no solutions/: --impl mine takes what you have written"),
    ],
)
def test_what_needs_the_solutions_says_so_in_a_line(
    students: Path, command: str, code: int, says: str
) -> None:
    done = distlab(students, *command.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
    assert says in done.stderr


# --- training with a learner's lessons -----------------------------------------------------------


def test_the_trainer_trains_with_what_a_learner_of_phase_1_has(mine: Path) -> None:
    solve(mine, "data_loader", "collectives", "trainer")
    path = mine / PHASE / "template_trainer.py"
    text = path.read_text()
    path.write_text(f"{text}\nprint('my own trainer')\n")
    done = distlab(mine, "train", *SHORT)
    assert done.returncode == 0, done.stderr
    assert "my own trainer" in done.stdout
    assert done.stderr.count("trains without checkpoints (4.1, 4.3, 4.4), ") == 1
    accuracy = re.search(r"^epoch 1 of 1: (\S+)% of 360 test images right", done.stderr, re.M)
    assert accuracy
    assert float(accuracy[1]) > 50
    path.write_text(f"{text}\ndef after(:\n")
    done = distlab(mine, "train", *SHORT)
    assert (done.returncode, done.stdout) == (78, "")
    assert "phase1_data_parallel/template_trainer.py, line " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trainer_that_is_not_written_is_a_line_that_names_the_tasks(mine: Path) -> None:
    solve(mine, "data_loader")
    done = distlab(mine, "train", *SHORT)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith(
        "error: this needs what you have not written yet: 1.3 exchange, 1.7 all_reduce_recursive"
    )
    assert done.stderr.endswith("Go on with: distlab check 1.3\n")
