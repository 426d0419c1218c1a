"""Phase 3 beside torch's own: rows and columns, and the collectives that each way needs."""

import json
from pathlib import Path

import pytest

from distlab import chosen, launch
from distlab.bench import ddp
from distlab.cli import main

SMALL = ddp.Sizes(rows=2, width=16, layers=6, bucket_mib=2 * 17 * 16 * 4 / 2**20)
NUM_BYTES = 4 * SMALL.layers * (SMALL.width**2 + 3 * SMALL.width)


def test_a_row_for_each_stage_and_for_torchs_is_printed_and_saved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ddp, "SIZES", SMALL)
    with pytest.raises(SystemExit) as left:
        main(["bench", "ddp", "--repeats", "2", "--save", str(tmp_path / "new")])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert "24 parameters on 2 gloo ranks: median of 2 steps" in printed
    names = [ddp.OURS, ddp.FLAT, ddp.PER_PARAMETER, ddp.TORCHS]
    for name in names:
        assert f"│ {name} " in printed

    record = json.loads((tmp_path / "new" / "ddp.json").read_text())
    run = {"ranks": 2, "repeats": 2, "impl": "solution"}
    assert record["arguments"] == {**run, **SMALL._asdict()}
    assert [*record["measured"]] == names
    for name, one in record["measured"].items():
        assert one["quartiles_s"][0] <= one["seconds"] <= one["quartiles_s"][1], name
    assert record["measured"][ddp.FLAT]["collective_bytes"] == NUM_BYTES
    assert (tmp_path / "new" / "ddp.png").read_bytes().startswith(b"\x89PNG")


def test_every_way_sums_the_same_bytes_in_another_number_of_collectives() -> None:
    arguments = chosen.SOLVED, SMALL, 1
    found, *others = launch.run(ddp.measure_on_rank, 2, *arguments, backend="gloo")
    assert all(other == found for other in others), "ranks do not agree on what was measured"
    num_bytes = {name: one.collective_bytes for name, one in found.items()}
    new_buckets = num_bytes.pop(ddp.TORCHS) - NUM_BYTES  # which torch agrees on in that step
    assert {*num_bytes.values()} == {NUM_BYTES}
    assert 0 <= new_buckets <= 8 * 4 * SMALL.layers
    calls = {name: one.collectives for name, one in found.items()}
    assert calls[ddp.FLAT] == 1
    assert calls[ddp.PER_PARAMETER] == 4 * SMALL.layers
    assert 1 < calls[ddp.OURS] <= SMALL.layers
    assert calls[ddp.TORCHS] < calls[ddp.PER_PARAMETER]


def test_gradients_as_views_take_less_than_a_flat_copy() -> None:
    found, *_ = launch.run(ddp.measure_on_rank, 2, chosen.SOLVED, SMALL, 1, backend="gloo")
    assert found[ddp.OURS].peak_bytes < found[ddp.FLAT].peak_bytes
