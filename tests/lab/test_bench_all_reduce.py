"""`distlab bench all_reduce --phase 3`: the table, what is saved, and that sums are checked."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from rich.console import Console

from distlab import chosen, launch
from distlab.bench import host_all_reduce, saving
from distlab.bench.host_all_reduce import COPIED, GLOO, REGISTERED
from distlab.cli import main

SMALL = (64, 4096)
NAMES = [GLOO, "ring", "segmented ring", "tree", "two trees", COPIED, REGISTERED]


def distlab(*arguments: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(("bench", "all_reduce", *arguments))
    assert left.value.code == 0


def test_the_table_has_gloo_and_all_others_as_multiples_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host_all_reduce, "SIZES_BYTES", (*SMALL, 2**30))
    options = ("--ranks", "2", "--repeats", "3", "--max-mib", "1", "--save", str(tmp_path / "new"))
    distlab("--phase", "3", *options)
    printed = capsys.readouterr().out
    assert "2 gloo ranks" in printed
    assert "median of 3" in printed
    [head] = [line for line in printed.splitlines() if line.startswith("┃")]
    assert head.replace("┃", " ").split() == ["64", "B", "4", "KiB"], "1 GiB is above --max-mib"
    rows = [line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│")]
    assert [name for name in rows if name] == NAMES
    assert printed.count("(1.00)") >= len(SMALL)
    assert "one message of gloo's: α = " in printed

    saved = json.loads((tmp_path / "new" / "phase3_all_reduce_2_ranks.json").read_text())
    assert (saved["ranks"], saved["repeats"], saved["impl"]) == (2, 3, "solution")
    assert saved["machine"]["torch"] == torch.__version__
    assert saved["message"]["alpha_s"] > 0
    assert list(saved["seconds_by_bytes"]) == NAMES
    for by_size in saved["seconds_by_bytes"].values():
        assert [int(size) for size in by_size] == list(SMALL)
        for cuts in by_size.values():
            assert 0 < cuts["q1"] <= cuts["median"] <= cuts["q3"]
    picture = tmp_path / "new" / "phase3_all_reduce_2_ranks.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"saved: {picture}" in printed.replace("\n", "")


def test_the_table_of_all_sizes_fits_into_80_columns() -> None:
    runs = {size: [1e-3] for size in host_all_reduce.SIZES_BYTES}
    times = host_all_reduce.Times(dict.fromkeys(NAMES, runs), alpha_s=1e-6, beta_s_per_byte=1e-9)
    console = Console(width=80, record=True)
    console.print(host_all_reduce._table(times, "2 gloo ranks"))
    printed = console.export_text()
    assert "…" not in printed
    for size in ("64 KiB", "1 MiB", "4 MiB", "16 MiB", "100 MiB", "256 MiB"):
        assert f" {size} ┃" in printed


def test_phase_1_saves_its_medians(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    distlab("--ranks", "2", "--repeats", "1", "--max-mib", "0", "--save", str(tmp_path))
    saved = json.loads((tmp_path / "phase1_all_reduce_2_ranks.json").read_text())
    assert saved["medians"]["sizes_bytes"] == [4, 4096]
    assert saved["medians"]["seconds"]["native"][0] > 0
    assert "one message: α" in capsys.readouterr().out


def test_another_phase_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(("bench", "all_reduce", "--phase", "2"))
    assert left.value.code == 2
    assert "'1', '3'" in capsys.readouterr().err


def with_a_wrong_sum() -> None:
    contestants = {
        "right": (dist.all_reduce, torch.empty(5)),
        "twice": (lambda x: x.mul_(3.0), torch.empty(5)),
    }
    host_all_reduce._seconds(contestants, 1)


def test_what_sums_wrongly_is_not_timed() -> None:
    with pytest.raises(launch.RankFailed, match="twice: rank 0 has a wrong sum"):
        on_ranks(with_a_wrong_sum, 2, backend="gloo")


def test_all_ranks_agree_on_every_run() -> None:
    first, *others = on_ranks(
        host_all_reduce.measure_on_rank, 3, chosen.SOLVED, SMALL, 2, backend="gloo"
    )
    assert all(other == first for other in others)
    assert {len(runs) for by_size in first.seconds.values() for runs in by_size.values()} == {2}


def starts() -> tuple[float, float]:
    agreed = host_all_reduce._start_together()
    return agreed, host_all_reduce.perf_counter()


def test_ranks_agree_when_to_start_and_none_starts_before() -> None:
    (agreed, left), *others = on_ranks(starts, 3, backend="gloo")
    assert agreed <= left
    for other_agreed, other_left in others:
        assert other_agreed == agreed <= other_left


def test_quartiles_are_those_of_the_runs() -> None:
    assert saving.quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == {"q1": 2.0, "median": 3.0, "q3": 4.0}
    assert saving.quartiles([7.0]) == {"q1": 7.0, "median": 7.0, "q3": 7.0}


def test_a_saved_file_replaces_the_last_one_and_names_the_machine(tmp_path: Path) -> None:
    for number in (1, 2):
        saving.save(tmp_path, "some", {"figure_s": number})
    path = tmp_path / "some.json"
    saved = json.loads(path.read_text())
    assert (saved["benchmark"], saved["figure_s"]) == ("some", 2)
    assert saved["machine"]["cores"] >= 1
    assert [*tmp_path.iterdir()] == [path]
