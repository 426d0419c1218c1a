"""`distlab bench compression`: what is measured, what is kept, and what a rank sends."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab import launch
from distlab.bench import compression
from distlab.bench.compression import (
    CONTESTANTS,
    FP16,
    OUR_INT8,
    OUR_POWER_SGD,
    OUR_SIGN,
    OUR_TOP_K,
    PLAIN,
    Sizes,
    counted_calls,
)
from distlab.cli import main

SMALL = Sizes(rows=4, width=24, layers=3, rank=2, steps=4)


def test_a_row_for_each_hook_is_printed_and_saved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compression, "SIZES", SMALL)
    with pytest.raises(SystemExit) as left:
        main(["bench", "compression", "--repeats", "2", "--save", str(tmp_path / "new")])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert "3 layers on 2 gloo ranks, r = 2: median of 2 steps, loss after 4" in printed
    record = json.loads((tmp_path / "new" / "compression.json").read_text())
    measured = record["measured"]
    assert [*measured] == [*CONTESTANTS]
    for name, one in measured.items():
        assert f"│ {name} " in printed
        assert one["loss"] > 0
    whole = 4 * SMALL.layers * (SMALL.width**2 + SMALL.width)
    factors = 4 * SMALL.layers * (2 * SMALL.rank * SMALL.width + SMALL.width)
    sent = {name: one["sent_bytes"] for name, one in measured.items()}
    assert sent[PLAIN] == whole  # of 2 ranks, each sends all of it: 2 (N - 1) / N is 1
    assert sent[FP16] == whole / 2
    assert sent[OUR_POWER_SGD] == factors
    assert whole / 64 < sent[OUR_TOP_K] < whole / 32  # 1 % of the values, each with an index
    assert whole / 4 < sent[OUR_INT8] < whole / 3.5
    assert whole / 32 < sent[OUR_SIGN] < whole / 16
    assert (tmp_path / "new" / "compression.png").read_bytes().startswith(b"\x89PNG")


def _counted() -> tuple[int, int, float]:
    x, halves = torch.zeros(6), torch.zeros(3)
    with counted_calls() as found:
        dist.all_reduce(tensor=x)
        dist.all_gather(tensor=halves, tensor_list=[torch.zeros(3), torch.zeros(3)])
        dist.reduce_scatter_tensor(halves, input=x)
        dist.all_to_all_single(x, x.clone())
    return found.calls, found.num_bytes, found.sent_bytes


def test_calls_are_counted_however_they_are_written() -> None:
    assert launch.run(_counted, 2, backend="gloo") == [(4, 84, 24 + 12 + 12 + 12)] * 2
