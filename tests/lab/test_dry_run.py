"""The dry run of a recipe, checked against simple formulas and one published figure."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from distlab.production.config import make_config
from distlab.production.dry_run import Prediction, predict
from distlab.production.launching import launch
from distlab.production.simulated_step import Step
from distlab.sim import GPU, Cluster

A100 = GPU.preset("A100-80GB")
SLOW_BYTES_PER_S = 1e8  # so slow that communication takes much longer than computation
SLOW = Cluster(4, 1, topology="ethernet", gpu=A100, nic_bytes_per_s=SLOW_BYTES_PER_S)
SMALL = {"model": "resnet18", "data": "synthetic", "image_size": 16, "batch_size": 64}
WEIGHTS = 11_173_962  # a ResNet-18 with a 3 x 3 stem and 10 classes
RING_S = 2 * 3 / 4 * 4 * WEIGHTS / SLOW_BYTES_PER_S  # each of 4 ranks sends 2 (N - 1) / N of all
RESNET_50 = {"model": "resnet50", "data": "imagefolder", "data_dir": "none", "image_size": 224}
CONFIG = Path(__file__).parents[2] / "configs/digits_cpu.yaml"


def predicted(keys: Mapping[str, Any], cluster: Cluster) -> Prediction:
    return predict(make_config({**SMALL, **keys}, "test"), cluster)


@cache
def on_slow(**keys: Any) -> Step:
    return predicted({"strategy": "course", **keys}, SLOW).step


def test_one_gpu_waits_for_nobody_and_figures_follow_from_its_step() -> None:
    found = predicted({"epochs": 3}, Cluster(1, 1, gpu=A100))
    step = found.step
    assert step.exposed_s == 0 < step.step_s
    assert found.predictions_per_s == 64 / step.step_s
    flops_per_s = 3 * step.forward_flops * found.predictions_per_s
    assert found.mfu == pytest.approx(flops_per_s / A100.peak_flops["float32"])
    assert found.training_s == pytest.approx(3 * (2048 / 64) * step.step_s)
    assert found.evaluation_s == pytest.approx(3 * (512 / 64) * step.evaluation_s)
    assert found.hours == pytest.approx((found.training_s + found.evaluation_s) / 3600)
    assert step.evaluation_s < step.step_s / 2


def test_a_step_on_one_gpu_takes_what_the_published_one_takes() -> None:
    """The efficiency was fitted to NVIDIA's 2,470 images/s."""
    keys = {**RESNET_50, "batch_size": 256, "precision": "bf16"}
    found = predicted(keys, Cluster(1, 1, gpu=A100))
    assert found.predictions_per_s == pytest.approx(2470, rel=0.03)
    assert 0.15 < found.mfu < 0.25
    assert 4.0e9 < found.step.forward_flops / 2 < 4.2e9  # the count of multiply-adds


@pytest.mark.parametrize("pattern", ["native", "ring"])
def test_a_step_waits_for_what_the_backward_pass_does_not_hide(pattern: str) -> None:
    step = on_slow(communication_pattern=pattern)
    computing_s = step.step_s - step.exposed_s
    assert RING_S - computing_s <= step.exposed_s <= 1.05 * RING_S


def test_sharding_needs_less_memory() -> None:
    none, state, _, all_sharded = (
        on_slow(zero_redundancy=stage, optimizer="adamw").peak_by_category for stage in range(4)
    )
    assert none["parameters"] == none["gradients"] == 4 * WEIGHTS
    assert state["parameters"] == pytest.approx(4 * WEIGHTS, rel=1e-6)  # plus padding
    assert none["optimizer_state"] == pytest.approx(2 * 4 * WEIGHTS, rel=0.01)
    assert state["optimizer_state"] == pytest.approx(none["optimizer_state"] / 4, rel=0.01)
    assert sum(all_sharded.values()) < sum(state.values()) < sum(none.values())


def test_a_table_is_printed_with_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"--config {CONFIG} --dry-run --cluster dgx-h100 --model transformer --strategy fsdp"
    assert launch(line.split()) == 0
    printed = capsys.readouterr().out
    assert "8 GPUs of dgx-h100: transformer, fp32, batches of 64 images" in printed
    for row in ("step", "waiting for the network", "images/s", "memory of a GPU", "the recipe"):
        assert f"\n{row} " in printed.replace("\n  ", "\n")
    assert "This is a prediction" in printed


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--config {} --cluster dgx-a10", "Did you mean 'dgx-a100'?"),
        ("--config {} --cluster laptop", "laptop has no GPUs to train on"),
        ("--config {} --nodes 0", "nodes must be 1 or more"),
        ("--config {} --strategi ddp", "there is no key 'strategi'"),
        ("--config {} --compression int8", "compression: a dry run predicts"),
        ("--config {} --batch_size 4000000", "it cannot train so"),
    ],
)
def test_what_cannot_be_predicted_ends_with_78(
    options: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(["--dry-run", *options.format(CONFIG).split()]) == 78
    printed = capsys.readouterr()
    assert printed.out == ""
    assert part in printed.err
