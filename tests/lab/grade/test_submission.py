"""Where a rank finds the learner's files, and where it does not look for them."""

import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest

from distlab import course
from distlab.grade import submission
from distlab.grade.outcomes import Outcome, Verdict, verdict_on
from distlab.grade.plugin import TIMEOUT_S
from distlab.grade.running import Grade
from distlab.grade.submission import Submission
from distlab.launch import LaunchError

ROOT = Path(__file__).parents[3]
PHASE = "phase1_data_parallel"
IMPORTS = f"from {PHASE}.template_collectives import exchange\n"


def hand_in(folder: Path, **files: str) -> Submission:
    for name, text in files.items():
        (folder / PHASE).mkdir(parents=True, exist_ok=True)
        (folder / PHASE / f"{name}.py").write_text(text)
    return Submission(folder)


def where_from(lesson: Any) -> str:
    return str(inspect.unwrap(lesson.exchange).__code__.co_filename)


def verdict_of(handed_in: Submission, task: str) -> Verdict:
    grade = Grade(handed_in, course.load(ROOT).task(task), "sim", TIMEOUT_S)
    with pytest.raises(LaunchError) as raised:
        grade.call(where_from)
    return verdict_on(raised.value)


def test_a_file_that_is_missing_does_not_come_from_the_courses_folder(tmp_path: Path) -> None:
    verdict = verdict_of(hand_in(tmp_path, template_trainer=IMPORTS), "1.9")
    assert verdict.outcome is Outcome.IMPORT_ERROR
    assert "line 1: ModuleNotFoundError" in verdict.message
    assert f"{PHASE}.template_collectives" in verdict.message
    assert verdict.details.strip() == IMPORTS.strip()


@pytest.mark.parametrize(("num_gpus", "is_traced"), [(1, True), (2, False)])
def test_what_needs_more_ranks_than_gpus_stays_in_the_simulated_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int, is_traced: bool
) -> None:
    handed_in = hand_in(tmp_path, collectives="def exchange(): pass\n")
    grade = Grade(handed_in, course.load(ROOT).task("1.4"), "nccl", TIMEOUT_S)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    monkeypatch.setattr("distlab.launch.run", lambda *args, **options: ["on GPUs"] * 2)
    assert (grade.run(where_from, 2).trace is not None) == is_traced


@pytest.mark.parametrize("name", ["collectives", "template_collectives"])
def test_files_are_found_under_both_names(tmp_path: Path, name: str) -> None:
    files = {"trainer": IMPORTS, name: "def exchange(): pass\n"}
    grade = Grade(hand_in(tmp_path, **files), course.load(ROOT).task("1.9"), "sim", TIMEOUT_S)
    assert grade.call(where_from) == str(tmp_path / PHASE / f"{name}.py")


@pytest.mark.parametrize("theirs", [None, "raise RuntimeError", "def finish(x): return 7"])
def test_what_is_given_comes_from_the_course(tmp_path: Path, theirs: str | None) -> None:
    mine = f"from {PHASE}.given import finish as exchange\n"
    files = {"collectives": mine} if theirs is None else {"collectives": mine, "given": theirs}
    grade = Grade(hand_in(tmp_path, **files), course.load(ROOT).task("1.4"), "sim", TIMEOUT_S)
    assert grade.call(where_from) == str(ROOT / PHASE / "given.py")


def test_a_lesson_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    verdict = verdict_of(hand_in(tmp_path, collectives="", template_collectives=""), "1.4")
    assert verdict.outcome is Outcome.IMPORT_ERROR
    assert "keep one of them" in verdict.message


def test_a_folder_that_is_called_solutions_is_not_the_solutions(tmp_path: Path) -> None:
    folder = tmp_path / "solutions"
    hand_in(folder, collectives=f"from solutions.{PHASE}.collectives import exchange\n")
    (folder / "__init__.py").write_text("")
    verdict = verdict_of(submission.find(str(folder), ROOT), "1.4")
    assert verdict.outcome is Outcome.IMPORT_ERROR
    assert "must not import solutions" in verdict.message
    assert submission.find("solution", ROOT).is_solution


@pytest.mark.parametrize("module", ["phase1.reference", "tests.phase1.judge_trainer"])
def test_what_judges_a_submission_is_not_for_it(tmp_path: Path, module: str) -> None:
    verdict = verdict_of(hand_in(tmp_path, collectives=f"import {module}\n"), "1.4")
    assert verdict.outcome is Outcome.IMPORT_ERROR
    assert f"must not import {module}" in verdict.message


def test_an_error_names_the_learners_line_where_the_course_itself_is_the_submission(
    tmp_path: Path,
) -> None:
    mine = f"import solutions.{PHASE}.collectives\n"
    shutil.copytree(ROOT / "distlab", tmp_path / "distlab")
    verdict = verdict_of(hand_in(tmp_path, template_collectives=mine), "1.4")
    assert verdict.message.startswith(f"{tmp_path / PHASE}/template_collectives.py, line 1: ")


def test_a_file_that_was_saved_as_utf_16_is_named_and_what_to_do(tmp_path: Path) -> None:
    handed_in = hand_in(tmp_path, template_collectives="")
    (tmp_path / PHASE / "template_collectives.py").write_bytes("x = 1\n".encode("utf-16-le"))
    verdict = verdict_of(handed_in, "1.4")
    assert verdict.outcome is Outcome.IMPORT_ERROR
    assert "template_collectives.py, line 1: " in verdict.message
    assert "save it as UTF-8, not as UTF-16" in verdict.message


def test_an_interrupt_of_a_lesson_is_an_import_error(tmp_path: Path) -> None:
    verdict = verdict_of(hand_in(tmp_path, collectives="raise KeyboardInterrupt\n"), "1.4")
    assert (verdict.outcome, "line 1" in verdict.message) == (Outcome.IMPORT_ERROR, True)


def test_files_that_lie_flat_are_refused_before_anything_is_graded(tmp_path: Path) -> None:
    (tmp_path / "template_collectives.py").write_text("")
    with pytest.raises(ValueError, match=f"contains none of .*{PHASE}.*; put the files"):
        submission.find(str(tmp_path), ROOT)


def test_every_file_that_could_be_imported_has_its_digest(tmp_path: Path) -> None:
    handed_in = hand_in(tmp_path, collectives="", helper="x = 1\n")
    (tmp_path / PHASE / ".#collectives.py").symlink_to("me@here.1234")  # an editor's lock
    (tmp_path / PHASE / "folder.py").mkdir()
    digests = handed_in.digests(PHASE)
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of nothing
    assert digests.pop(f"{PHASE}/collectives.py") == empty
    assert list(digests) == [f"{PHASE}/helper.py"]
