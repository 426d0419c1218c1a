"""What lies beside a lesson: byte code that lies, files without end, links that lead around."""

import importlib.util
import os
import py_compile
from pathlib import Path
from typing import Any

import pytest

from distlab import course
from distlab.grade.outcomes import Outcome, Verdict, verdict_on
from distlab.grade.plugin import TIMEOUT_S
from distlab.grade.running import Grade
from distlab.grade.submission import MAX_FILES, Submission
from distlab.launch import LaunchError
from distlab.util.files import MAX_SOURCE_BYTES

ROOT = Path(__file__).parents[3]
PHASE = "phase1_data_parallel"
TERABYTE = 10**12


def hand_in(folder: Path, **files: str) -> Submission:
    (folder / PHASE).mkdir()
    for name, text in files.items():
        (folder / PHASE / f"{name}.py").write_text(text)
    return Submission(folder)


def graded(submission: Submission) -> Grade:
    return Grade(submission, course.load(ROOT).task("1.4"), "sim", TIMEOUT_S)


def verdict_of(submission: Submission) -> Verdict:
    with pytest.raises(LaunchError) as raised:
        graded(submission).call(what_it_says)
    return verdict_on(raised.value)


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
    submission, file = hand_in(tmp_path, **texts), tmp_path / PHASE / f"{name}.py"
    file.write_text("SAYS = 'byte code'\n")
    cached = importlib.util.cache_from_source(str(file))
    py_compile.compile(
        str(file), cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    file.write_text(texts[name])
    assert graded(submission).call(what_it_says) == "source"


def test_nothing_is_written_into_a_hand_in(tmp_path: Path) -> None:
    submission = hand_in(
        tmp_path, collectives=f"from {PHASE}.helper import SAYS\n", helper="SAYS=1"
    )
    graded(submission).call(what_it_says)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        *("collectives.py", "helper.py", PHASE)
    ]


def test_digests_are_of_regular_files_of_a_lessons_size(tmp_path: Path) -> None:
    submission, folder = hand_in(tmp_path, collectives="x = 1\n"), tmp_path / PHASE
    sparse(folder / "large.py", TERABYTE)
    os.mkfifo(folder / "pipe.py")
    (folder / "device.py").symlink_to("/dev/zero")
    (folder / "loop").symlink_to(folder)
    digests = submission.digests(PHASE)
    assert list(digests) == [f"{PHASE}/collectives.py", f"{PHASE}/large.py"]
    assert digests[f"{PHASE}/large.py"] == ""


def test_very_many_files_do_not_have_a_digest_each(tmp_path: Path) -> None:
    submission = hand_in(tmp_path, **{f"lesson_{n}": "" for n in range(MAX_FILES + 10)})
    assert len(submission.digests(PHASE)) == MAX_FILES


def test_a_lesson_of_a_terabyte_is_an_import_error(tmp_path: Path) -> None:
    submission = hand_in(tmp_path)
    sparse(tmp_path / PHASE / "collectives.py", TERABYTE)
    verdict = verdict_of(submission)
    assert verdict.outcome is Outcome.IMPORT_ERROR
    assert f"collectives.py has {TERABYTE:,} bytes, limit {MAX_SOURCE_BYTES:,}" in verdict.message


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_an_import_error(tmp_path: Path, kind: str) -> None:
    submission, path = hand_in(tmp_path), tmp_path / PHASE / "template_collectives.py"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    verdict = verdict_of(submission)
    assert verdict.outcome is Outcome.IMPORT_ERROR
    assert "is not a regular file" in verdict.message
    assert submission.sha256(PHASE, "collectives") == ""
