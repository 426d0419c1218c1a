"""A submission's output and report are bounded in size; for results, see test_plain."""

import os
import re

import pytest

from distlab import launch
from distlab.launch.protocol import WorldFolder


def forges_a_report(num_bytes: int) -> None:
    """Put a file of this size where the rank's report belongs, and suppress the real report."""
    import gc

    folder = next(
        o for o in gc.get_objects() if isinstance(o, WorldFolder) and o.path.name != "none"
    )
    path = folder.path / "rank-0.report"
    path.touch()
    os.truncate(path, num_bytes)
    WorldFolder.write_report = lambda *_: None  # type: ignore[method-assign]


def test_a_report_of_3_gb_is_not_read() -> None:
    with pytest.raises(launch.RankFailed, match="has 3,000,000,000 bytes, limit 67,108,864"):
        launch.run(forges_a_report, 1, 3_000_000_000, backend="gloo", plain_results=True)


def prints(num_lines: int) -> None:
    for number in range(num_lines):
        print(f"line {number} " + 90 * "x")


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_what_ranks_print_is_shown_up_to_a_limit_then_its_end(
    backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    launch.run(prints, 1, 100_000, backend=backend, plain_results=True)
    shown = capfd.readouterr().out
    assert len(shown) < 300_000
    assert "line 0 " in shown
    assert re.search(r"\n\[of 10,[\d,]+ bytes of output, the rest is not shown\]\n", shown)
    assert shown.splitlines()[-1].startswith("line 99999 xxx")


def test_an_own_program_may_print_as_it_likes(capfd: pytest.CaptureFixture[str]) -> None:
    launch.run(prints, 1, 10_000, backend="gloo")
    assert len(capfd.readouterr().out) > 1_000_000
