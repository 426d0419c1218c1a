"""`distlab bench`: counts that must be exact, contestants that must agree, and saved records."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import distlab
from ranks import on_ranks
from torch import nn

from distlab import chosen, launch
from distlab.bench import all_reduce, compression, contest, ddp, phase2, trainer, zero
from distlab.bench.contest import Collectives, Contest, Contestant, Measured
from distlab.bench.trainer import Match, Sizes, matches

FLOAT_BYTES = 4
SOLVED = partial(chosen.lesson, chosen.SOLVED)


# --- the harness ---------------------------------------------------------------------------------


def count_calls() -> tuple[int, int]:
    rank, x = dist.get_rank(), torch.ones(3)
    with Collectives() as collectives:
        dist.all_reduce(x)
        dist.all_gather([torch.empty(3), torch.empty(3)], x)
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
    return collectives.calls, collectives.num_bytes


def count_calls_of_hooks() -> tuple[int, int, float]:
    x, halves = torch.zeros(6), torch.zeros(3)
    with compression.counted_calls() as calls:
        dist.all_reduce(tensor=x)
        dist.all_gather(tensor=halves, tensor_list=[torch.zeros(3), torch.zeros(3)])
        dist.reduce_scatter_tensor(halves, input=x)
        dist.all_to_all_single(x, x.clone())
    return calls.calls, calls.num_bytes, calls.sent_bytes


def count_both() -> tuple[object, object]:
    return count_calls(), count_calls_of_hooks()


def test_collectives_are_counted_and_messages_are_not() -> None:
    gathered = 3 * FLOAT_BYTES * (2 + 1)
    expected = (2, 3 * FLOAT_BYTES + gathered), (4, 84, 24 + 12 + 12 + 12)
    assert launch.run(count_both, 2, backend="gloo") == [expected] * 2


# --- contestants that differ are not timed -------------------------------------------------------


def linear(weight: float, *, loss: float | None = None, is_trained: bool = True) -> Contestant:
    """Return a contestant with a single weight w, whose loss is w² unless ``loss`` is given."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)

    def step() -> float:
        square: torch.Tensor = model(torch.ones(1)).square().sum()
        if is_trained:
            square.backward()  # type: ignore[no-untyped-call]
        return square.item() if loss is None else loss

    return Contestant(model, step)


def refusals(others: list[Callable[[], Contestant]]) -> list[str]:
    return [refusal(make) for make in others]


def refusal(make: Callable[[], Contestant]) -> str:
    try:
        contest.measure({"ours": make(), "torch's": linear(1.0)}, {"torch's": "ours"}, repeats=1)
    except ValueError as error:
        return str(error)
    return ""


def test_contestants_must_compute_the_same() -> None:
    others = [
        partial(linear, 1.0),
        partial(linear, 1.0, loss=2.0),
        partial(linear, -1.0),
        partial(linear, 1.0, is_trained=False),
    ]
    (texts,) = launch.run(refusals, 1, others, backend="gloo")
    assert texts[0] == ""
    expected = (
        "the losses are 2 and 1",
        "on rank 0, the gradients of weight have the norms 2 and 2",
        "on rank 0, the gradients of weight have the norms 0 and 2",
    )
    for text, problem in zip(texts[1:], expected, strict=True):
        assert text == f"ours and torch's do not compute the same: {problem}"


# --- contests: small, with exact counts ----------------------------------------------------------


def held(a_contest: Contest, folder: Path, ranks: int = 2, **sizes: Any) -> dict[str, Measured]:
    """Hold a small contest; return the measurements that it records."""
    a_contest.hold(ranks, 2, "solution", folder, **sizes)
    record = json.loads((folder / f"{a_contest.name}.json").read_text())
    expected = {"ranks": ranks, "repeats": 2, "impl": "solution"}
    assert record["arguments"] == {**expected, **a_contest.sizes._replace(**sizes)._asdict()}
    assert (folder / f"{a_contest.name}.png").read_bytes().startswith(b"\x89PNG")
    measured: dict[str, Measured] = record["measured"]
    for row in measured.values():
        assert row["quartiles_s"][0] <= row["seconds"] <= row["quartiles_s"][1]
    return measured


def test_1f1b_keeps_fewer_micro_batches_than_gpipe_in_ours_and_in_torchs(tmp_path: Path) -> None:
    sizes = {"rows": 1, "positions": 16, "width": 16, "heads": 2}
    peak = {
        name: row["peak_bytes"] for name, row in held(phase2.PIPELINE, tmp_path, **sizes).items()
    }
    assert peak["1F1B"] < peak["GPipe"] <= peak["torch's ScheduleGPipe"]
    assert peak["1F1B"] <= peak["torch's Schedule1F1B"] < peak["torch's ScheduleGPipe"]


def test_checkpoints_keep_as_little_as_torchs(tmp_path: Path) -> None:
    sizes = {"rows": 4, "positions": 16, "width": 16, "heads": 2, "layers": 16}
    measured = held(phase2.MEMORY, tmp_path, 1, **sizes)
    peak = {name: row["peak_bytes"] for name, row in measured.items()}
    assert peak[phase2.OURS] <= peak[phase2.TORCHS]
    assert 2 * peak[phase2.OURS] < peak[phase2.KEPT]


def test_a_block_split_by_ours_needs_four_all_reduces(tmp_path: Path) -> None:
    sizes = {"rows": 2, "positions": 8, "heads_per_rank": 1, "head_width": 4, "blocks": 2}
    measured = held(phase2.TENSOR_PARALLEL, tmp_path, **sizes)
    assert {name: row["collectives"] for name, row in measured.items()} == {
        phase2.SPLIT: 8,
        phase2.TORCHS_SPLIT: 12,  # torch reduces a gradient each for query, key and value
        phase2.PREPARED: 8,
    }
    for row in measured.values():
        assert row["collective_bytes"] == row["collectives"] * FLOAT_BYTES * 2 * 8 * 2 * 4


def test_every_way_sums_the_same_bytes_in_another_number_of_collectives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    width, layers = 16, 6
    bucket_mib = 2 * 17 * 16 * 4 / 2**20
    sizes = {"rows": 2, "width": width, "layers": layers, "bucket_mib": bucket_mib}
    measured = held(ddp.CONTEST, tmp_path, **sizes)
    printed = capsys.readouterr().out
    assert "24 parameters on 2 gloo ranks: median of 2 steps" in printed
    assert all(f"│ {name} " in printed for name in measured)
    whole = 4 * layers * (width**2 + 3 * width)
    num_bytes = {name: row["collective_bytes"] for name, row in measured.items()}
    new_buckets = num_bytes.pop(ddp.TORCHS) - whole  # bytes sent to agree on new buckets
    assert {*num_bytes.values()} == {whole}
    assert 0 <= new_buckets <= 8 * 4 * layers
    calls = {name: row["collectives"] for name, row in measured.items()}
    assert (calls[ddp.FLAT], calls[ddp.PER_PARAMETER]) == (1, 4 * layers)
    assert 1 < calls[ddp.OURS] <= layers
    assert calls[ddp.TORCHS] < calls[ddp.PER_PARAMETER]
    # Our gradients are views of the buckets, while FLAT copies them.
    assert measured[ddp.OURS]["peak_bytes"] < measured[ddp.FLAT]["peak_bytes"]


def test_each_stage_of_zero_holds_less_and_calls_what_its_task_promises(tmp_path: Path) -> None:
    width, layers = 24, 5
    bucket_mib = 4 * (24 * 24 + 3 * 24) / 2**20
    sizes = {"rows": 3, "width": width, "layers": layers, "bucket_mib": bucket_mib}
    measured = held(zero.CONTEST, tmp_path, **sizes)
    peaks = {name: row["peak_bytes"] for name, row in measured.items()}
    assert peaks[zero.STATE] > peaks[zero.GRADIENTS] > peaks[zero.PARAMETERS]
    assert peaks[zero.KEPT] > peaks[zero.FREED]
    whole = 4 * layers * (width**2 + 3 * width)
    assert peaks[zero.STATE] >= 3 * whole  # parameters, gradients, and half of Adam's state
    calls = {name: row["collectives"] for name, row in measured.items()}
    assert calls[zero.STATE] == 2
    assert calls[zero.GRADIENTS] == calls[zero.KEPT] == 2 * layers
    assert calls[zero.PARAMETERS] == calls[zero.FREED] <= 3 * layers
    if zero.STATUS.exists():
        assert all(row["resident_bytes"] > 0 for row in measured.values())


def test_hooks_send_as_many_bytes_as_their_codes_have(tmp_path: Path) -> None:
    width, layers, rank = 24, 3, 2
    sizes = {"rows": 4, "width": width, "layers": layers, "rank": rank, "steps": 4}
    measured = held(compression.CONTEST, tmp_path, **sizes)
    whole = 4 * layers * (width**2 + width)
    factors = 4 * layers * (2 * rank * width + width)
    sent = {name: row["sent_bytes"] for name, row in measured.items()}
    assert sent[compression.PLAIN] == whole  # each of N = 2 ranks sends 2 (N - 1) / N of it: all
    assert sent[compression.FP16] == whole / 2
    assert sent[compression.OUR_POWER_SGD] == factors
    assert whole / 64 < sent[compression.OUR_TOP_K] < whole / 32  # the top 1 %, with indices
    assert whole / 4 < sent[compression.OUR_INT8] < whole / 3.5
    assert whole / 32 < sent[compression.OUR_SIGN] < whole / 16
    assert all(row["loss"] > 0 for row in measured.values())


# --- all-reduces ---------------------------------------------------------------------------------

NAMES = ["gloo", "ring", "segmented ring", "tree", "two trees", "shared memory", "registered"]


def test_all_reduces_of_phase_3_are_multiples_of_gloos(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(all_reduce, "SIZES_BYTES", (64, 4096, 2**30))
    options = ("--ranks", "2", "--repeats", "3", "--max-mib", "1", "--save", str(tmp_path))
    assert distlab("bench", "all_reduce", "--phase", "3", *options) == 0
    printed = capsys.readouterr().out
    [head] = [line for line in printed.splitlines() if line.startswith("┃")]
    assert head.replace("┃", " ").split() == ["64", "B", "4", "KiB"], "1 GiB is above --max-mib"
    assert printed.count("(1.00)") >= 2
    assert "one message of gloo's: α = " in printed
    saved = json.loads((tmp_path / "phase3_all_reduce_2_ranks.json").read_text())
    assert saved["message"]["alpha_s"] > 0
    assert list(saved["seconds_by_bytes"]) == NAMES
    assert (tmp_path / "phase3_all_reduce_2_ranks.png").read_bytes().startswith(b"\x89PNG")


def started_and_refused() -> tuple[float, float, str]:
    agreed_s = all_reduce.start_together()
    left_s = all_reduce.perf_counter()
    contestants = {
        "right": (dist.all_reduce, torch.empty(5)),
        "twice": (lambda x: x.mul_(3.0), torch.empty(5)),
    }
    try:
        all_reduce.seconds_of(contestants, 1)
    except ValueError as error:
        return agreed_s, left_s, str(error)
    return agreed_s, left_s, ""


def test_ranks_start_together_and_a_wrong_sum_is_refused() -> None:
    answers = on_ranks(started_and_refused, 2, backend="gloo")
    assert len({agreed_s for agreed_s, _, _ in answers}) == 1
    for rank, (agreed_s, left_s, refused) in enumerate(answers):
        assert agreed_s <= left_s
        assert refused == f"twice: rank {rank} has a wrong sum"


# --- the trainer ---------------------------------------------------------------------------------

ALL = matches(2, "transformer")
SMALL = ("--repeats", "1", "--steps", "2", "--batch-size", "8")


def test_the_trainer_learns_what_its_rivals_learn_and_a_line_for_each_is_saved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the first steps, each of torch's loops is compared with one of ours."""
    two = Match({name: ALL[0].ours[name] for name in ("ddp", "ring")}, ALL[0].theirs)
    monkeypatch.setattr(trainer, "matches", lambda ranks, model: [two, *ALL[1:]])
    assert distlab("bench", "trainer", *SMALL, "--save", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "transformer, 16 x 16, batches of 8, fp32, 2 cpu ranks" in printed
    record = json.loads((tmp_path / "trainer.json").read_text())
    run = {"ranks": 2, "repeats": 1, "impl": "solution"}
    assert record["arguments"] == {**run, **Sizes(steps=2, batch_size=8, keys=[])._asdict()}
    measured = record["measured"]
    assert measured["ddp"]["theirs"] == measured["ring"]["theirs"]  # both ran against the same loop
    assert measured["server"]["theirs"] is measured["server"]["ratio"] is None
    for name, row in measured.items():
        assert f"\n{name} " in printed
        assert row["ratio"] is None or f"{row['ratio']:.3f} (" in printed


def test_the_trainer_is_compared_on_texts_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Tensor parallelism too, whose rival must split the layers of a gpt."""
    tiny = ("layers=1", "width=16", "sequence_length=8", "--model", "gpt")
    only = ("--only", "ddp", "--only", "tensor", "--only", "pipeline")
    assert distlab("bench", "trainer", *tiny, *only, *SMALL, "--save", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "gpt, layers=1, width=16, sequence_length=8" in printed
    assert "tokens/s" in printed
    measured = json.loads((tmp_path / "trainer.json").read_text())["measured"]
    assert {name: row["rival"] for name, row in measured.items()} == {
        "ddp": "DistributedDataParallel",
        "tensor": "ColwiseParallel",
        "pipeline": None,
    }
