"""Finding the learner's files, and dealing with anything else that a hand-in may contain."""

import importlib.util
import inspect
import os
import py_compile
from pathlib import Path
from typing import Any

import pytest
from commands import COURSE, PHASE, ROOT, hand_in

from distlab.grade import submission
from distlab.grade.outcomes import Outcome, Verdict, verdict_on
from distlab.grade.plugin import TIMEOUT_S
from distlab.grade.running import Grade
from distlab.grade.submission import MAX_FILES, Submission
from distlab.launch import LaunchError
from distlab.util.files import MAX_SOURCE_BYTES

IMPORTS = f"from {PHASE}.template_collectives import exchange\n"
TERABYTE = 10**12


def grade_of(handed_in: Submission, task: str = "1.3") -> Grade:
    return Grade(handed_in, COURSE.task(task), "sim", TIMEOUT_S)


def where_from(lesson: Any) -> str:
    return str(inspect.unwrap(lesson.exchange).__code__.co_filename)


def verdict_of(handed_in: Submission, task: str = "1.3") -> Verdict:
    with pytest.raises(LaunchError) as raised:
        grade_of(handed_in, task).call(where_from)
    return verdict_on(raised.value)


def test_a_file_that_is_missing_does_not_come_from_the_courses_folder(tmp_path: Path) -> None:
    verdict = verdict_of(hand_in(tmp_path, template_trainer=IMPORTS), "1.9")
    assert verdict.outcome is Outcome.IMPORT_ERROR
    assert "line 1: ModuleNotFoundError" in verdict.message
    assert f"{PHASE}.template_collectives" in verdict.message
    assert verdict.details.strip() == IMPORTS.strip()


@pytest.mark.parametrize("name", ["collectives", "template_collectives"])
def test_files_are_found_under_both_names(tmp_path: Path, name: str) -> None:
    files = {"trainer": IMPORTS, name: "def exchange(): pass\n"}
    grade = grade_of(hand_in(tmp_path, **files), "1.9")
    assert grade.call(where_from) == str(tmp_path / PHASE / f"{name}.py")


@pytest.mark.parametrize("theirs", [None, "raise RuntimeError", "def finish(x): return 7"])
def test_what_is_given_comes_from_the_course(tmp_path: Path, theirs: str | None) -> None:
    mine = f"from {PHASE}.given import finish as exchange\n"
    files = {"collectives": mine} if theirs is None else {"collectives": mine, "given": theirs}
    grade = grade_of(hand_in(tmp_path, **files), "1.3")
    assert grade.call(where_from) == str(ROOT / PHASE / "given.py")


def test_a_lesson_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    verdict = verdict_of(hand_in(tmp_path, collectives="", template_collectives=""), "1.3")
    assert verdict.outcome is Outcome.IMPORT_ERROR
    assert "keep one of them" in verdict.message


def test_a_folder_that_is_called_solutions_is_not_the_solutions(tmp_path: Path) -> None:
    folder = tmp_path / "solutions"
    hand_in(folder, collectives=f"from solutions.{PHASE}.collectives import exchange\n")
    (folder / "__init__.py").write_text("")
    verdict = verdict_of(submission.find(str(folder), ROOT), "1.3")
    assert verdict.outcome is Outcome.IMPORT_ERROR
    assert "must not import solutions" in verdict.message
    assert submission.find("solution", ROOT).is_solution


@pytest.mark.parametrize("module", ["phase1.reference", "tests.phase1.judge_trainer"])
def test_what_judges_a_submission_is_not_for_it(tmp_path: Path, module: str) -> None:
    verdict = verdict_of(hand_in(tmp_path, collectives=f"import {module}\n"), "1.3")
    assert verdict.outcome is Outcome.IMPORT_ERROR
    assert f"must not import {module}" in verdict.message


def test_a_file_that_was_saved_as_utf_16_is_named_and_what_to_do(tmp_path: Path) -> None:
    handed_in = hand_in(tmp_path, template_collectives="")
    (tmp_path / PHASE / "template_collectives.py").write_bytes("x = 1\n".encode("utf-16-le"))
    verdict = verdict_of(handed_in, "1.3")
    assert verdict.outcome is Outcome.IMPORT_ERROR
    assert "template_collectives.py, line 1: " in verdict.message
    assert "save it as UTF-8, not as UTF-16" in verdict.message


def test_files_that_lie_flat_are_refused_before_anything_is_graded(tmp_path: Path) -> None:
    (tmp_path / "template_collectives.py").write_text("")
    with pytest.raises(ValueError, match=f"contains none of .*{PHASE}.*; put the files"):
        submission.find(str(tmp_path), ROOT)


# --- files next to a lesson ----------------------------------------------------------------------


def what_it_says(lesson: Any) -> Any:
    return lesson.SAYS


def sparse(path: Path, num_bytes: int) -> None:
    path.touch()
    os.truncate(path, num_bytes)


@pytest.mark.parametrize("name", ["collectives", "helper"])
def test_byte_code_of_a_hand_in_is_not_run(tmp_path: Path, name: str) -> None:
    texts = {"collectives": "SAYS = 'source'\n", "helper": "SAYS = 'source'\n"}
    if name == "helper":
        texts["collectives"] = f"from {PHASE}.helper import SAYS\n"
    handed_in, file = hand_in(tmp_path, **texts), tmp_path / PHASE / f"{name}.py"
    file.write_text("SAYS = 'byte code'\n")
    cached = importlib.util.cache_from_source(str(file))
    py_compile.compile(
        str(file), cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    file.write_text(texts[name])
    assert grade_of(handed_in).call(what_it_says) == "source"


def test_nothing_is_written_into_a_hand_in(tmp_path: Path) -> None:
    handed_in = hand_in(tmp_path, collectives=f"from {PHASE}.helper import SAYS\n", helper="SAYS=1")
    assert grade_of(handed_in).call(what_it_says) == 1
    assert {path.name for path in tmp_path.rglob("*")} == {PHASE, "collectives.py", "helper.py"}


def test_digests_are_of_regular_files_of_a_lessons_size(tmp_path: Path) -> None:
    handed_in, folder = hand_in(tmp_path, collectives="x = 1\n"), tmp_path / PHASE
    sparse(folder / "large.py", TERABYTE)
    (folder / "folder.py").mkdir()
    (folder / ".#collectives.py").symlink_to("me@here.1234")  # an editor's lock file
    os.mkfifo(folder / "pipe.py")
    (folder / "device.py").symlink_to("/dev/zero")
    (folder / "loop").symlink_to(folder)
    digests = handed_in.digests(PHASE)
    assert list(digests) == [f"{PHASE}/collectives.py", f"{PHASE}/large.py"]
    assert digests[f"{PHASE}/large.py"] == ""


def test_very_many_files_do_not_have_a_digest_each(tmp_path: Path) -> None:
    handed_in = hand_in(tmp_path, **{f"lesson_{n}": "" for n in range(MAX_FILES + 10)})
    assert len(handed_in.digests(PHASE)) == MAX_FILES


def test_a_lesson_of_a_terabyte_is_an_import_error(tmp_path: Path) -> None:
    handed_in = hand_in(tmp_path)
    sparse(tmp_path / PHASE / "collectives.py", TERABYTE)
    verdict = verdict_of(handed_in)
    assert verdict.outcome is Outcome.IMPORT_ERROR
    assert f"collectives.py has {TERABYTE:,} bytes, limit {MAX_SOURCE_BYTES:,}" in verdict.message


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_an_import_error(tmp_path: Path, kind: str) -> None:
    handed_in, path = hand_in(tmp_path), tmp_path / PHASE / "template_collectives.py"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    verdict = verdict_of(handed_in)
    assert verdict.outcome is Outcome.IMPORT_ERROR
    assert "is not a regular file" in verdict.message
    assert handed_in.sha256(PHASE, "collectives") == ""
