"""Judges task 3.12: when buckets travel, and what memory they take."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import MEASURED, UNIFORM, check_peak
from phase3 import ddp as b
from phase3.buckets import Case, Param
from phase3.ddp import Limits
from phase3.ddp_models import Layer
from phase3.judge_buckets import buckets_of
from phase3.judge_ddp import run_together

RIGHT_TIMES = 1.05
CLOCK_S = 15e-6  # all readings of the clock of the simulated world


@task("3.12")
@pytest.mark.parametrize("kind", ["slow computation", "slow links", "both alike"])
def test_buckets_travel_during_the_backward_pass(grade: Grade, kind: str) -> None:
    longest_s = {"slow computation": 2e-3, "slow links": 1e-4, "both alike": 3e-4}[kind]
    layers = [
        Layer(grade.random.randint(20_000, 100_000), grade.random.uniform(0.3, 1.0) * longest_s)
        for _ in range(6)
    ]
    limits = Limits(500_000, 100_000)
    # When layer 5 is done in the first step, two buckets may leave.
    order = [0, 1, 2, 5, 4, 3]
    before_s = longest_s / 2
    computing_s = before_s + sum(layer.backward_s for layer in layers)
    run = run_together(grade, b.timed, 4, layers, order, before_s, limits, cluster=UNIFORM)
    for rank, steps in enumerate(run.results):
        for step, result in enumerate(steps):
            here = f"{kind}, layers used in the order {order}, step {step}, rank {rank} of 4"
            used = order if step else sorted(order)
            case = Case(tuple(Param(layers[i].numel) for i in used), *limits)
            buckets = [[used[i] for i in bucket] for bucket in buckets_of(case)]
            sizes = [sum(4 * layers[i].numel for i in bucket) for bucket in buckets]
            check(
                result["num_bytes"] == sizes,
                f"{here}: buckets of {sizes} bytes should be reduced, not of "
                f"{result['num_bytes']}.",
            )
            _check_times(here, step, computing_s, buckets, result)


def _check_times(
    here: str, step: int, computing_s: float, buckets: Sequence[Sequence[int]], result: Any
) -> None:
    check(
        result["computed_s"] <= computing_s + CLOCK_S,
        f"{here}: the backward pass computes for {_ms(computing_s)}, but took "
        f"{_ms(result['computed_s'])}: a hook should start an all-reduce and return. Wait in "
        "finish_gradient_synchronization.",
    )
    complete_s = accumulate((max(result["came_s"][i] for i in bucket) for bucket in buckets), max)
    ready_s = list(complete_s)
    for place, (left_s, came_s) in enumerate(zip(result["left_s"], ready_s, strict=True)):
        check(
            left_s <= came_s + CLOCK_S,
            f"{here}: bucket {place} of {len(buckets)} was complete after {_ms(came_s)} of the "
            f"backward pass, and those before it had left; it left after {_ms(left_s)}, and the "
            f"backward pass ended after {_ms(result['computed_s'])}. Start each all-reduce in the "
            "hook of its last gradient.",
        )
    _check_waiting(here, step, ready_s, result)


def _check_waiting(here: str, step: int, ready_s: Sequence[float], result: Any) -> None:
    alone_s, end_s = result["alone_s"], result["computed_s"]
    rest_s = [sum(alone_s[place:]) for place in range(len(alone_s))]
    done_s = max(came + rest for came, rest in zip(ready_s, rest_s, strict=True))
    waits_s = max(0.0, done_s - end_s)
    waited_s = result["end_s"] - end_s
    check(
        step == 0 or waited_s <= RIGHT_TIMES * waits_s + CLOCK_S,  # the first agrees on an order
        f"{here}: by its docstring, the step waits {_ms(waits_s)} after the backward pass; it "
        f"waited {_ms(waited_s)}, more than {RIGHT_TIMES} times as long. Send nothing besides the "
        "buckets, and start those that are left before the first wait.",
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4f} ms"


# Memory


@task("3.12")
def test_gradients_are_where_parameters_are(grade: Grade) -> None:
    for rank, result in enumerate(grade.run(b.on_another_device, 2).results):
        check(
            result == {"weight": "xpu:0", "bias": "xpu:0"},
            f"rank {rank} of 2: parameters are on the device xpu:0, and so should be their "
            f"buckets; the devices of the gradients are {result}.",
        )


@task("3.12")
def test_gradients_take_no_second_memory(grade: Grade) -> None:
    num_layers, width = 10, grade.random.randint(60, 90)
    weight = 4 * width**2
    limits = Limits(4 * weight, weight)
    run = grade.run(b.in_little_memory, 2, num_layers, width, limits, options=MEASURED)
    activations = 4 * width * 4 * (num_layers + 2)
    most = (2 * num_layers + 1) * weight + activations
    check_peak(
        *(run, [most] * 2),
        "That is the parameters, the buckets whose views are the gradients, the gradient of one "
        "parameter that is just computed, and the activations. Let param.grad be a view of the "
        "bucket as soon as its hook runs, or before the backward pass, and free the old buckets "
        "before you make new ones.",
    )
