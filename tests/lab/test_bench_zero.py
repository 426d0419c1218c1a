"""`distlab bench zero`: what is measured, what must agree, and what is kept."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distlab import chosen, launch
from distlab.bench import zero, zero_contestants
from distlab.bench.rivals import Measured
from distlab.bench.zero_contestants import (
    CONTESTANTS,
    FREED,
    GRADIENTS,
    KEPT,
    PARAMETERS,
    REDUNDANCY,
    STATE,
    Sizes,
    Trained,
)
from distlab.cli import main

SMALL = Sizes(rows=3, width=24, layers=5, bucket_mib=4 * (24 * 24 + 3 * 24) / 2**20)
NUM_BYTES = 4 * SMALL.layers * (SMALL.width**2 + 3 * SMALL.width)


@cache
def measured() -> dict[str, Measured]:
    """Measure once, and check that the ranks agree."""
    arguments = chosen.SOLVED, SMALL, 2
    found, *others = launch.run(zero.measure_on_rank, 2, *arguments, backend="gloo")
    assert all(other == found for other in others), "ranks do not agree on what was measured"
    return found


def test_numbers_and_a_figure_are_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(zero, "SIZES", SMALL)
    with pytest.raises(SystemExit) as left:
        main(["bench", "zero", "--repeats", "2", "--save", str(tmp_path / "new")])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert "5 layers on 2 gloo ranks: median of 2 steps" in printed
    record = json.loads((tmp_path / "new" / "zero.json").read_text())
    run = {"ranks": 2, "repeats": 2, "impl": "solution"}
    assert record["arguments"] == {**run, **SMALL._asdict()}
    assert [*record["measured"]] == [*CONTESTANTS]
    for name, one in record["measured"].items():
        assert printed.count(f"│ {name} ") == 2
        assert one["quartiles_s"][0] <= one["seconds"] <= one["quartiles_s"][1]
        assert not zero.STATUS.exists() or one["resident_bytes"] > 0
    assert (tmp_path / "new" / "zero.png").read_bytes().startswith(b"\x89PNG")


def test_each_stage_holds_less_than_the_one_before() -> None:
    peaks = {name: one.peak_bytes for name, one in measured().items()}
    assert peaks[STATE] > peaks[GRADIENTS] > peaks[PARAMETERS]
    assert peaks[KEPT] > peaks[FREED]
    assert peaks[STATE] >= 3 * NUM_BYTES  # parameters, gradients, and half of Adam's state


def test_stages_call_the_collectives_that_their_tasks_promise() -> None:
    calls = {name: one.collectives for name, one in measured().items()}
    layers = SMALL.layers
    assert calls[STATE] == 2
    assert calls[GRADIENTS] == calls[KEPT] == 2 * layers
    assert calls[PARAMETERS] == calls[FREED] <= 3 * layers


def test_ranks_without_rivals_measure_too() -> None:
    (found,) = launch.run(zero.measure_on_rank, 1, chosen.SOLVED, SMALL, 1, backend="gloo")
    assert [*found] == [*CONTESTANTS]


def slower(lesson: Any, sizes: Sizes, x: Tensor) -> Trained:
    """Train with a tenth of the learning rate."""
    plain = zero_contestants.ADAM
    zero_contestants.ADAM = plain | {"lr": plain["lr"] / 10}
    try:
        return CONTESTANTS[REDUNDANCY](lesson, sizes, x)
    finally:
        zero_contestants.ADAM = plain


def measure_something_else() -> None:
    """Measure with a stage 1 that trains something else."""
    CONTESTANTS[STATE] = slower
    zero.measure_on_rank(chosen.SOLVED, SMALL, 1)


def test_ours_must_train_what_its_rival_trains() -> None:
    expected = "stage 1 and ZeroRedundancyOptimizer do not train the same: on rank 0"
    with pytest.raises(launch.LaunchError, match=expected):
        launch.run(measure_something_else, 2, backend="gloo")


def test_a_process_rises_by_what_it_holds() -> None:
    if not zero.STATUS.exists():
        pytest.skip("only Linux tells the peak of a process")
    large = Sizes(rows=1, width=512, layers=8)
    num_bytes = 4 * large.layers * large.width**2
    (risen,) = launch.run(
        zero.resident_on_rank, 1, chosen.SOLVED, large, STATE, backend="gloo", timeout_s=60
    )
    assert risen > 4 * num_bytes  # parameters, gradients and Adam's state


def test_a_difference_of_rounding_is_none() -> None:
    first = dict(zero_contestants.model_of(SMALL).named_parameters())
    theirs = {name: param.detach() + 1.0 for name, param in first.items()}
    ours = {name: param + 1e-6 * torch.ones_like(param) for name, param in theirs.items()}
    zero._check_values(ours, theirs, SMALL, "ours and theirs")
