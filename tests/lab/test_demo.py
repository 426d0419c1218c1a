"""The demo: its output, its files, and its check of the folder before it trains."""

import re
from pathlib import Path

import pytest

from distlab import demo
from distlab.cli import main

pytestmark = pytest.mark.usefixtures("forked")


def test_demo_trains_twice_compares_and_draws(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "folder"
    demo.run_demo(folder, "--epochs=1")
    printed = "".join(capfd.readouterr())
    for line in ("─ 1 worker ─", "─ 4 workers ─", "1 worker | 4 workers", "What to open next"):
        assert line in printed
    difference = re.search(
        r"Same training: in float64, over 23 steps, .* further apart than (\S+)\.$", printed, re.M
    )
    assert difference
    assert float(difference[1]) < 1e-9
    accuracies = re.search(r"Same result: test accuracy (\S+)% and (\S+)%\.", printed)
    assert accuracies
    assert accuracies[1] == accuracies[2]
    assert float(accuracies[1]) > 50
    assert re.search(r"Speed: 4 workers trained \d+\.\d times as many images per second", printed)
    assert f"{folder / 'demo.png'} shows the curves, " in printed
    paths = re.findall(rf"{folder}[^\s,:]*", printed)
    assert {Path(path).name for path in paths} > {"demo.png", "1", "4", "curve.png"}
    assert [path for path in paths if not Path(path).exists()] == []
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("speed", "cores", "start"),
    [
        (0.7, 2, "An 8x8 image is little work"),
        (1.9, 2, None),
        (2.1, 2, "Do not trust that speed: here, 4 workers can be 2 times as fast at most."),
        (3.9, 64, None),
        (4.1, 64, "Do not trust that speed: here, 4 workers can be 4 times as fast at most."),
    ],
)
def test_a_speed_that_surprises_is_explained(speed: float, cores: int, start: str | None) -> None:
    remarks = demo._remarks(speed, cores)
    assert len(remarks) == (start is not None)
    assert all(remark.startswith(str(start)) for remark in remarks)


def test_what_the_demo_points_to_exists() -> None:
    root = Path(demo.__file__).parents[1]
    files = re.findall(r"(?:solutions|configs)/\S+", demo.NEXT)
    assert files
    assert [file for file in files if not (root / file).is_file()] == []


def test_a_folder_that_cannot_be_written_to_stops_the_demo_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(demo, "_train")  # any training would now raise an AttributeError
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SystemExit) as left:
            main(["demo", "--out", str(out)])
        assert left.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(f"distlab demo: --out {out} cannot be written to: ")
        assert printed.err.count("\n") == 1
