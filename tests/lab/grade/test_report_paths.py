"""Report paths: where a report is written, what it may replace, and what a crash leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distlab import course
from distlab.grade import report_paths, reports
from distlab.grade.outcomes import Outcome, Verdict
from distlab.grade.results import GradeResult, TaskResult, TestResult

TASK = course.load(Path(__file__).parents[3]).task("1.4")
RESULT = GradeResult(
    "here",
    [
        TaskResult(
            *(TASK, "a.py", "ab"), 1, False, [TestResult("a", "sim", Verdict(Outcome.PASSED), 1.0)]
        )
    ],
    2.0,
)


@pytest.mark.parametrize("earlier", reports.FORMATS)
def test_an_earlier_report_of_any_format_goes_at_the_start(tmp_path: Path, earlier: str) -> None:
    path = tmp_path / "report"
    reports.write(RESULT, [(earlier, path)])
    report_paths.parse([f"json={path}"])
    assert not path.exists()


@pytest.mark.parametrize("text", ["# My README\n", "import torch\n", '{"score": 100}', "\0\xff"])
def test_what_is_no_report_is_never_replaced(tmp_path: Path, text: str) -> None:
    path, other = tmp_path / "mine", tmp_path / "report.json"
    path.write_text(text)
    reports.write(RESULT, [("json", other)])
    with pytest.raises(ValueError, match="is not an earlier report"):
        report_paths.parse([f"json={other}", f"markdown={path}"])
    assert path.read_text() == text
    assert other.exists(), "nothing is removed before all are known to be ours"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full device")
def test_a_report_that_cannot_be_written_keeps_no_other_back(tmp_path: Path) -> None:
    paths = [("markdown", Path("/dev/full")), ("json", tmp_path / "report.json")]
    with pytest.raises(OSError, match="No space"):
        reports.write(GradeResult("here", [], 1.0), paths)
    assert (tmp_path / "report.json").exists()


def test_a_report_is_moved_into_place_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="No space"):
        reports.write(RESULT, [("json", tmp_path / "a.json")])
    assert list(tmp_path.iterdir()) == []


def test_standard_output_goes_on_where_it_is_also_in_a_file(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from distlab.grade import report_paths as r\n"
        "print('before', flush=True); (_, path), = r.parse(['json=/dev/stdout'])\n"
        "r.write(path, 'report\\n'); print('after')"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "before\nreport\nafter\n"
    assert os.path.lexists("/dev/stdout")
