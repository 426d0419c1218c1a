"""`distlab bench trainer`: who trains beside whom, that they learn the same, and what is kept."""

import json
from pathlib import Path

import pytest

from distlab.bench import trainer
from distlab.bench.trainer import Match, Sizes, matches, matches_of
from distlab.bench.trainer_measured import Compared, Speed, _check
from distlab.cli import main

ALL = matches(2, "transformer")
DATA_PARALLEL = Match({name: ALL[0].ours[name] for name in ("ddp", "ring")}, ALL[0].theirs)
OPTIONS = ["--repeats", "2", "--steps", "2", "--batch-size", "8"]


def bench(*options: str) -> int | str | None:
    """Run the command, and return its exit code."""
    with pytest.raises(SystemExit) as left:
        main(["bench", "trainer", *options])
    return left.value.code


def test_a_line_for_each_way_is_printed_and_saved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trainer, "matches", lambda ranks, model: [DATA_PARALLEL, ALL[-1]])
    assert bench(*OPTIONS, "--save", str(tmp_path / "new")) == 0
    printed = capsys.readouterr().out
    assert "transformer, 16 x 16, batches of 8, fp32, 2 cpu ranks" in printed
    assert "2 steps at a\ntime" in printed
    record = json.loads((tmp_path / "new" / "trainer.json").read_text())
    run = {"ranks": 2, "repeats": 2, "impl": "solution"}
    assert record["arguments"] == {**run, **Sizes(steps=2, batch_size=8)._asdict()}
    ddp, ring, server = (record["measured"][name] for name in ("ddp", "ring", "server"))
    assert ddp["theirs"] == ring["theirs"]  # both in turns with the same loop
    for one in (ddp, ring):
        assert len(one["ours"]["images_per_s"]) == 2
        assert one["ratios"]["q1"] <= one["ratios"]["q3"]
        assert f"{one['ratio']:.3f} (" in printed
    assert server["theirs"] is server["ratio"] is None
    assert all(speed > 0 for speed in server["ours"]["images_per_s"])


@pytest.mark.parametrize("match", ALL[3:-1], ids=lambda match: match.theirs[0])
def test_ours_learns_what_its_rival_learns(
    match: Match, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is checked before anything is timed, in the first steps."""
    monkeypatch.setattr(trainer, "matches", lambda ranks, model: [match])
    assert bench(*OPTIONS, "--repeats", "1") == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in match.ours)


def test_what_learns_something_else_is_refused() -> None:
    _check({"ring": 2.0, "DistributedDataParallel": 2.001})
    with pytest.raises(ValueError, match=r"the mean loss of ring is 2\.1, and another's is 2$"):
        _check({"ring": 2.1, "DistributedDataParallel": 2.0})


def test_a_ratio_is_that_of_the_medians_and_its_quartiles_those_of_the_rounds() -> None:
    ours, theirs = Speed([10.0, 20.0, 60.0], None), Speed([10.0, 40.0, 30.0], None)
    compared = Compared(ours, "DistributedDataParallel", theirs)
    assert compared.ratio == 20 / 30
    assert compared.ratios == {"q1": 0.75, "median": 1.0, "q3": 1.5}
    assert Compared(ours, None, None).ratio is None


def test_what_needs_several_ranks_or_attention_is_left_out_elsewhere() -> None:
    names = {name for match in matches(1, "resnet50") for name in match.ours}
    assert {"ddp", "ring", "ZeRO 3"} <= names
    assert names.isdisjoint({"pipeline", "tensor", "server"})
    assert "tensor" not in {name for match in matches(2, "resnet18") for name in match.ours}


def test_a_wrong_size_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--model", "resnet", "--batch-size", "8") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "use one of resnet18, resnet50" in printed.err


def test_a_way_is_chosen_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*OPTIONS, "--repeats", "1", "--only", "ddp") == 0
    printed = capsys.readouterr()
    assert "\nddp " in printed.out
    assert "\nring " not in printed.out
    assert printed.err.startswith("1 of 1: ddp, beside DistributedDataParallel\n")
    assert [list(match.ours) for match in matches_of(["ZeRO 3", "ring"], 2, "resnet18")] == [
        ["ring"],
        ["ZeRO 3"],
    ]


def test_a_wrong_name_gets_one_line_with_the_right_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench("--only", "zero", "--only", "ddp") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no way 'zero' here: use ddp, native, ring" in " ".join(printed.err.split())
