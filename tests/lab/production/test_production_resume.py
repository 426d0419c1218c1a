"""A run that is stopped and resumed ends in the same state as an undisturbed one, bit for bit."""

import errno
import json
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from little_runs import GPT, Case, Outcome, digest, in_world, little, logits_of, plain, started
from torch import Tensor, nn

from distlab import launch
from distlab.production import telemetry
from distlab.production.config import changed_keys
from distlab.production.errors import ConfigError
from distlab.production.states import Buffers, average_buffers
from solutions.phase4_production import checkpoint
from solutions.phase4_production.imagenet_trainer import Training

COURSE = {"strategy": "course"}
RANDOM: Case = {"mixup": 0.4, "label_smoothing": 0.1, "ema_decay": 0.9, "augment": "crop_flip"}
STOPS = (2, 3)  # within an epoch, and at its end
REPLICATED: dict[str, Case] = {
    "top_k": {"compression": "top_k"},  # has a residual
    "fsdp adamw": {"strategy": "fsdp", "optimizer": "adamw"},
    "zero 1": {**COURSE, "zero_redundancy": 1, "optimizer": "adamw"},
    "zero 3": {**COURSE, "zero_redundancy": 3},
}
SPLIT: dict[str, Case] = {
    "pipeline": {**COURSE, "pipeline_parallelism": 2},
    "tensor, written at once": {**COURSE, "tensor_parallelism": 2, "async_save": False},
    "gpt pipeline": {**GPT, **COURSE, "parallelism": "pp=2", "mixup": 0.0},
}
MOVED: dict[str, Case] = {"ddp": {}, "top_k": REPLICATED["top_k"]}
CASES = {**SPLIT, **REPLICATED}


# --- inside a rank -------------------------------------------------------------------------------


def stop_after(training: Training, step: int) -> None:
    """Ask the run to stop during a step, and check that it ends after that step."""
    one_step = training.train_step

    def asked(*batch: Any) -> Tensor:
        if training.progress.step + 1 == step:
            training.stop.received = dist.get_rank() == dist.get_world_size() - 1
        return one_step(*batch)

    training.train_step = asked  # type: ignore[method-assign]
    each_step = mock.patch.object(telemetry, "AGREE_EVERY_S", 0.0)  # steps take milliseconds
    with each_step, pytest.raises(SystemExit) as left:
        training.run()
    assert (left.value.code, training.progress.step) == (75, step)


def digests(training: Training) -> dict[str, str]:
    """Return a hash of each part of the state; all ranks must call this function."""
    state = training.checkpoints.own_state.state_dict()
    return {name: digest(part) for name, part in {**state["parts"], **state}.items()}


def straight_and_stopped(folder: Path) -> dict[str, Outcome]:
    return {name: _both(folder / name.replace(" ", "-"), case) for name, case in CASES.items()}


def _both(folder: Path, case: Case) -> Outcome:
    straight = started(little(folder / "straight", **{**RANDOM, **case}))
    straight.run()
    right = digests(straight)
    for stop in STOPS:
        stop_after(started(little(folder / "stopped", **{**RANDOM, **case})), stop)
    last = started(little(folder / "stopped", **{**RANDOM, **case}))
    begun = last.progress.step
    last.run()
    return {"begun": begun, "right": right, "found": digests(last)}


def stopped_for_others(folder: Path, cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        stop_after(started(little(folder / name.replace(" ", "-"), **case)), 4)


def world(folder: Path) -> Outcome:
    """Run everything that needs a world of two ranks."""
    stopped_for_others(folder, MOVED)
    return {"both": straight_and_stopped(folder / "both"), "buffers": buffers_of_a_rank()}


# --- worlds --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def outcomes(folder: Path, fast_ranks: None) -> list[Outcome]:
    return in_world(world, 2, folder)


@pytest.mark.parametrize("name", CASES)
def test_a_stopped_run_ends_as_the_undisturbed_one(outcomes: list[Outcome], name: str) -> None:
    for outcome in outcomes:
        found = outcome["both"][name]
        assert found["begun"] == STOPS[-1]
        assert found["found"] == found["right"]


# Strategies differ only in their state, so a round trip of each state covers resumed runs too.
COMPRESSORS = ("top_k", "random_k", "threshold", "int8", "sign", "power_sgd")
KEPT: dict[str, Case] = {
    "ring": {**COURSE, "communication_pattern": "ring"},
    "zero 2": {**COURSE, "zero_redundancy": 2},
    "adamw, mean": {"optimizer": "adamw", "ema_decay": 0.9},
    "power_sgd in the course's": {**COURSE, "compression": "power_sgd"},
    **{name: {"compression": name} for name in COMPRESSORS},
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", KEPT.values(), ids=KEPT)
def test_the_state_of_a_strategy_survives_saving_and_loading(case: Case, tmp_path: Path) -> None:
    first = started(little(tmp_path / "run", **case))
    first.run()
    second = started(little(tmp_path / "run", **case))
    assert digests(second) == digests(first)
    assert ("compression" in digests(second)) == ("compression" in case)
    second.run()  # no step is left; the run closes its files


@pytest.mark.usefixtures("outcomes", "alone")
@pytest.mark.parametrize("name", MOVED)
def test_another_number_of_ranks_continues(folder: Path, tmp_path: Path, name: str) -> None:
    training = started(little(folder / name, **MOVED[name]))
    assert training.progress.step == 4
    training.run()
    if not MOVED[name]:
        expected = torch.tensor(plain(tmp_path)["logits"])
        assert torch.allclose(torch.tensor(logits_of(training)), expected, rtol=1e-3, atol=1e-4)


# Shards and stages: each run is stopped on four simulated ranks, and goes on with fewer replicas.
MEAN: Case = {"precision": "fp64", "ema_decay": 0.9}
OTHER_SIZE: dict[str, tuple[int, Case]] = {
    **{f"zero {n}": (3, {**MEAN, **COURSE, "zero_redundancy": n}) for n in (1, 2, 3)},
    "fsdp": (3, {**MEAN, "strategy": "fsdp"}),
    "server": (3, {**MEAN, **COURSE, "communication_pattern": "parameter_server"}),
    "pipeline": (2, {**MEAN, **COURSE, "parallelism": "pp=2"}),
    "pipeline, zero 1": (2, {**MEAN, **COURSE, "parallelism": "pp=2", "zero_redundancy": 1}),
}
FEWER_STAGES: Case = {**OTHER_SIZE["pipeline"][1], "parallelism": "pp=3"}


def continued(run_dir: Path, case: Case) -> Any:
    """Finish a run, and return the mean model's logits on the rank that has them."""
    training = started(little(run_dir, **case))
    assert training.progress.step == 4
    training.run()
    with training.mean.in_place():
        return logits_of(training)


@pytest.mark.parametrize("name", OTHER_SIZE)
def test_shards_and_stages_go_on_with_fewer_replicas(tmp_path: Path, name: str) -> None:
    size, case = OTHER_SIZE[name]
    in_world(stopped_for_others, 4, tmp_path, {"run": case}, backend="sim")
    logits = in_world(continued, size, tmp_path / "run", case, backend="sim")
    expected = plain(tmp_path, ema_decay=0.9)["logits"]
    for found in filter(None, logits):
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-9)
    assert any(logits)


@pytest.mark.usefixtures("alone")
def test_shards_of_another_model_are_refused(tmp_path: Path) -> None:
    shards: Case = {**GPT, **COURSE, "zero_redundancy": 3}
    stop_after(started(little(tmp_path / "run", **shards)), 2)
    with pytest.raises(ConfigError, match=r"another run \(width was 16\): .*set the keys back"):
        started(little(tmp_path / "run", **{**shards, "width": 8}))


def test_other_stages_cannot_go_on(tmp_path: Path) -> None:
    in_world(stopped_for_others, 2, tmp_path, {"run": OTHER_SIZE["pipeline"][1]}, backend="sim")
    with pytest.raises(launch.LaunchError, match="stage 0 of 2, shard 0 of 1") as told:
        in_world(continued, 3, tmp_path / "run", FEWER_STAGES, backend="sim")
    assert "set the keys back" in str(told.value)


# --- states --------------------------------------------------------------------------------------


def buffers_of_a_rank() -> Any:
    """Give each rank different buffers; return their values after averaging and after loading."""
    module = nn.BatchNorm1d(2)
    mean: Any = module.running_mean
    mean.fill_(float(dist.get_rank()))
    buffers = Buffers(module)
    state = deepcopy(buffers.state_dict())
    average_buffers(module, None)
    averaged = mean.tolist()
    buffers.load_state_dict(state)
    own = mean.tolist()
    buffers.load_state_dict({"0": state["1"]})  # saved by a world of one
    return averaged, own, mean.tolist(), int(module.num_batches_tracked or 0)


def test_buffers_are_each_ranks_own_and_averaged_for_an_evaluation(outcomes: list[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome["buffers"] == ([0.5, 0.5], [float(rank)] * 2, [1.0, 1.0], 0)


def buffers_beside_a_server() -> Any:
    """Average buffers over all ranks but the first; return this rank's."""
    module = nn.BatchNorm1d(1)
    mean: Any = module.running_mean
    mean.fill_(1.0 + dist.get_rank())
    average_buffers(module, dist.new_group([1, 2]))
    return mean.item()


def test_a_server_has_no_part_in_the_average_of_buffers() -> None:
    assert in_world(buffers_beside_a_server, 3, backend="sim") == [1.0, 2.5, 2.5]


# --- one rank, in this process -------------------------------------------------------------------


def fail_after(training: Training, step: int) -> None:
    """Train, and simulate a power failure after this many steps."""
    one_step = training.train_step

    def failing(*batch: Any) -> Tensor:
        if training.progress.step == step:
            raise RuntimeError("the power has failed")
        return one_step(*batch)

    training.train_step = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the power has failed"):
        training.run()
    training.checkpoints.saver.wait()


def noted(run_dir: Path) -> Counter[tuple[int, str]]:
    """Count how often rank 0's file has each metric of each step."""
    lines = (run_dir / "metrics.rank0.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return Counter(
        (r["step"], name) for r in records for name in r if name not in ("step", "epoch")
    )


@pytest.mark.parametrize(("save_every", "failed_after"), [(1, 3), (3, 4), (100, 4)])
def test_a_failed_run_goes_on_from_its_last_checkpoint(
    alone: None, tmp_path: Path, save_every: int, failed_after: int
) -> None:
    straight = started(little(tmp_path / "straight", **RANDOM, save_every=save_every))
    straight.run()
    config = little(tmp_path / "failed", **RANDOM, save_every=save_every)
    fail_after(started(config), failed_after)
    again = started(config)
    assert again.progress.step <= failed_after
    again.run()
    assert digests(again) == digests(straight)
    assert noted(config.run_dir) == noted(tmp_path / "straight")
    assert {*noted(config.run_dir).values()} == {1}


def test_of_a_torn_checkpoint_the_one_before_is_used(
    alone: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = little(tmp_path / "run", save_every=1)
    fail_after(started(config), 5)
    newest = config.run_dir / "checkpoints" / "step-00000005" / "state.pt"
    newest.write_bytes(newest.read_bytes()[:-7])
    again = started(config)
    assert again.progress.step == 4
    assert "skipped step-00000005: state.pt" in capfd.readouterr().err
    again.run()
    straight = started(little(tmp_path / "straight"))
    straight.run()
    assert digests(again) == digests(straight)


def test_damaged_checkpoints_alone_are_no_new_beginning(alone: None, tmp_path: Path) -> None:
    config = little(tmp_path / "run", save_every=2)
    fail_after(started(config), 4)
    for state in (config.run_dir / "checkpoints").glob("*/state.pt"):
        state.write_bytes(b"")
    with pytest.raises(ConfigError, match="Move the folder away to begin anew"):
        started(config)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"model": "resnet18", "image_size": 16}, "(model was transformer, image_size was 8)"),
        ({"image_size": 16}, "are of another run (image_size was 8)"),
        ({"ema_decay": 0.9}, "ema_decay was 0.0"),
        ({"compression": "sign"}, "are of another run (compression was none)"),
        ({"resume": "never"}, "has checkpoints, and resume is never"),
        ({"optimizer": "adamw"}, "are of another run (optimizer was sgd)"),
        ({**COURSE, "zero_redundancy": 3}, "FileNotFoundError"),
    ],
)
def test_checkpoints_of_another_run_are_refused(
    alone: None, tmp_path: Path, other: Case, told: str
) -> None:
    stop_after(started(little(tmp_path / "run")), 2)
    with pytest.raises(ConfigError) as caught:
        started(little(tmp_path / "run", **other))
    assert told in str(caught.value)
    assert str(tmp_path / "run" / "checkpoints") in str(caught.value)


def test_a_pattern_of_communication_does_not_make_another_run(alone: None, tmp_path: Path) -> None:
    stop_after(started(little(tmp_path / "run", **COURSE)), 2)
    other = little(tmp_path / "run", **COURSE, communication_pattern="ring", width=128)
    assert changed_keys(other, other.run_dir / "config.yaml") == ["width was 64"]
    again = started(other)
    assert again.progress.step == 2
    again.run()


@pytest.mark.parametrize("case", [{}, {**COURSE, "zero_redundancy": 3}])
def test_a_disk_that_cannot_be_read_is_not_blamed_on_the_run(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    config = little(tmp_path / "run", **case)
    stop_after(started(config), 2)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint, "load_checkpoint", fail)
    monkeypatch.setattr(checkpoint, "load_sharded", fail)
    with pytest.raises(OSError, match="Input/output error"):
        started(config)


def test_a_run_that_is_done_has_nothing_to_do(alone: None, tmp_path: Path) -> None:
    config = little(tmp_path / "run", save_every=3)
    started(config).run()
    before = noted(config.run_dir)
    again = started(config)
    again.run()
    assert (again.progress.step, len(again.progress.history)) == (6, 2)
    assert noted(config.run_dir) == before


def test_more_epochs_continue_where_fewer_ended(alone: None, tmp_path: Path) -> None:
    started(little(tmp_path / "run", schedule="constant", epochs=1)).run()
    longer = started(little(tmp_path / "run", schedule="constant"))
    assert longer.progress.step == 3
    longer.run()
    straight = started(little(tmp_path / "straight", schedule="constant"))
    straight.run()
    assert digests(longer) == digests(straight)


def kept_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def test_a_save_compares_sizes_and_reads_no_older_checkpoint(alone: None, tmp_path: Path) -> None:
    config = little(tmp_path / "run", save_every=1, keep=2, async_save=False)
    fail_after(started(config), 3)
    again = started(config)
    older = config.run_dir / "checkpoints" / "step-00000003" / "state.pt"
    older.write_bytes(bytes(older.stat().st_size))  # only its hash tells
    fail_after(again, 4)
    assert kept_in(config.run_dir) == ["step-00000003", "step-00000004"]


def test_only_so_many_checkpoints_are_kept(alone: None, tmp_path: Path) -> None:
    config = little(tmp_path / "run", save_every=1, keep=2)
    started(config).run()
    assert kept_in(config.run_dir) == ["step-00000005", "step-00000006"]
