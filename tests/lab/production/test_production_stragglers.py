"""Slow ranks are named, by the part of the step in which they are slow, and no others are."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from little_runs import Case, in_world, little, started
from torch import Tensor

from distlab.production import telemetry
from distlab.production.strategies import Strategy
from phase4_production.given import StepTimes
from solutions.phase4_production.imagenet_trainer import Training

pytestmark = pytest.mark.usefixtures("fast_ranks")

COURSE = {"strategy": "course"}
STRATEGIES: dict[str, Case] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "course": COURSE,
    "zero 1": {**COURSE, "zero_redundancy": 1},
    "zero 2": {**COURSE, "zero_redundancy": 2},
    "zero 3": {**COURSE, "zero_redundancy": 3},
    "tensor": {**COURSE, "parallelism": "tp=2"},
}
UNEVEN: dict[str, Case] = {  # rank 0 has another kind of work than ranks 1 and 3
    "pipeline": {**COURSE, "parallelism": "pp=2"},
    "server": {**COURSE, "communication_pattern": "parameter_server"},
}
SLOW = {  # ranks that sleep, and the part of the step in which they do -> what is reported
    ((1,), "compute"): [(1, "compute")],
    ((1,), "data"): [(1, "data")],
    ((0, 1, 2, 3), "compute"): [],
}
STEPS = 3  # in an epoch, and judged together
TIMES_AS_LONG = 10  # the sleep, in the longest undisturbed steps of any rank: noise is shorter


class Sleep:
    """A rank's sleep in a part of each step."""

    seconds, part = 0.0, ""

    def in_part(self, part: str) -> None:
        time.sleep(self.seconds if part == self.part else 0.0)


def named(run_dir: Path, cases: list[Case]) -> list[list[list[tuple[int, str]]]]:
    """Return who is named with each strategy and each way to be slow."""
    with mock.patch.object(telemetry, "STRAGGLERS_OVER", STEPS):
        return [_named(run_dir / f"{place}", case) for place, case in enumerate(cases)]


def _named(run_dir: Path, case: Case) -> list[list[tuple[int, str]]]:
    training, sleep = started(little(run_dir, epochs=99, **case)), Sleep()
    with training.telemetry, training.batches:
        _let_sleep(training, sleep)
        training.train_epoch()
        _, longest_s = _epoch(training)
        found = []
        for ranks, part in SLOW:
            is_slow = dist.get_rank() in ranks
            sleep.seconds, sleep.part = is_slow * TIMES_AS_LONG * longest_s, part
            found.append(_epoch(training)[0])
        return found


def _epoch(training: Training) -> tuple[list[tuple[int, str]], float]:
    """Train for an epoch; return who is slow, and the seconds of the longest step of any rank."""
    named, steps_s, detector = [], [], training.telemetry.stragglers
    add: Callable[[StepTimes], Any] = detector.add

    def added(times: StepTimes) -> Any:
        steps_s.append(times.step_s)
        named.extend(slow := add(times))
        return slow

    with mock.patch.object(detector, "add", added):
        training.train_epoch()
    longest_s = torch.tensor(max([0.0, *steps_s]))
    dist.all_reduce(longest_s, dist.ReduceOp.MAX)
    group = detector.group or dist.group.WORLD
    ranks = [(dist.get_global_rank(group, slow.rank), slow.part) for slow in named]
    return ranks, float(longest_s)


def _let_sleep(training: Training, sleep: Sleep) -> None:
    """Let a rank sleep between its forward and backward pass, and in its loader."""
    strategy, batches = training.strategy, training.batches
    loss_sum, of_epoch = strategy.loss_sum, batches.of_epoch

    def slow_loss(logits: Tensor, targets: Tensor) -> Tensor:
        sleep.in_part("compute")
        return loss_sum(logits, targets)

    def slow_batches(strategy: Strategy) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in of_epoch(strategy):
            sleep.in_part("data")
            yield batch

    strategy.loss_sum = slow_loss
    batches.of_epoch = slow_batches  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Who is named on each rank, with each strategy."""
    found = dict[str, Any]()
    for size, cases in ((2, STRATEGIES), (4, UNEVEN)):
        folder = tmp_path_factory.mktemp("stragglers")
        by_rank = in_world(named, size, folder, [*cases.values()])
        found |= dict(zip(cases, zip(*by_rank, strict=True), strict=True))
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_slow_rank_is_named_and_no_other(outcomes: dict[str, Any], name: str) -> None:
    assert [*outcomes[name]] == [[*SLOW.values()]] * 2


@pytest.mark.parametrize("name", UNEVEN)
def test_a_rank_is_compared_with_those_that_have_the_same_work(
    outcomes: dict[str, Any], name: str
) -> None:
    of_rank_0, of_rank_1, *_, of_rank_3 = outcomes[name]
    # A server has no peers. Steps of a stage in which nobody sleeps are so short that noise may
    # name one of its two ranks.
    peers = {"server": set(), "pipeline": {0, 2}}[name]
    assert {rank for named in of_rank_0 for rank, _ in named} <= peers
    assert of_rank_1 == of_rank_3 == [*SLOW.values()]
