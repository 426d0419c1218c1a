"""What ranks agree on about their steps, how often they do so, and which steps are timed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from little_runs import CPU, little
from ranks import on_ranks

from distlab.production import telemetry, watch
from distlab.production.lessons import find_lessons
from distlab.production.progress import Interval, Progress
from distlab.production.telemetry import Costs, Telemetry, steps_in
from distlab.production.watch import Watch
from phase4_production.given import StepTimes

pytestmark = pytest.mark.usefixtures("fast_ranks")


def told(sizes: list[list[int]]) -> Any:
    """Record steps with a loss of 1 + rank per image, and 1 + rank bad images; sum over ranks."""
    rank, interval = dist.get_rank(), Interval(torch.device("cpu"))
    for number in sizes[rank]:
        interval.add(torch.tensor(number * (1.0 + rank)), number)
        interval.add_times(StepTimes(2.0 + rank, 0.0, 0.0, 0.0), is_exact=True)
    return interval.of_all_ranks(rank + 1)


@pytest.mark.parametrize(
    ("sizes", "loss"),
    [
        ([[4, 4]], 1.0),
        ([[4, 4], [4, 4]], 1.5),
        ([[6, 6], [2, 2]], 1.25),  # the mean over samples, not over ranks
        ([[], [3], [1]], 2.25),  # rank 0 is a parameter server
        ([[]] * 5, 0.0),
    ],
)
def test_ranks_know_the_mean_loss_and_step_and_the_sum_of_bad_images(
    sizes: list[list[int]], loss: float
) -> None:
    size = len(sizes)
    seconds = sum(2.0 + rank for rank in range(size) if sizes[rank]) / size
    found = on_ranks(told, size, sizes, backend="sim")
    assert found == [(pytest.approx(loss), pytest.approx(seconds), size * (size + 1) // 2)] * size
    assert len(set(found)) == 1, "the same bits: what follows from it is the same on all ranks"


@pytest.mark.parametrize(
    ("step_s", "steps"), [(0.0, 10), (0.027, 10), (0.1, 10), (0.3, 3), (0.6, 1), (30.0, 1)]
)
def test_short_steps_are_not_followed_by_an_agreement_each(step_s: float, steps: int) -> None:
    assert steps_in(1.0, step_s) == steps


def test_an_agreement_may_be_wanted_after_each_step() -> None:
    assert steps_in(0.0, 0.001) == 1


# --- steps that are timed on a GPU ---------------------------------------------------------------

SECOND, LAUNCH = 1.0, 0.125  # of a step on the GPU, and of the calls that start it


class Gpu:
    """A GPU that works behind the host, and the host's clock."""

    def __init__(self) -> None:
        self.now_s = self.done_s = 0.0
        self.num_waits = 0

    def start(self, seconds: float) -> None:
        self.now_s += LAUNCH
        self.done_s = max(self.now_s, self.done_s) + seconds

    def synchronize(self, *_: object) -> None:
        self.num_waits += 1
        self.now_s = max(self.now_s, self.done_s)


def timed(run_dir: Path, num_steps: int) -> tuple[list[tuple[int, StepTimes]], list[int]]:
    """Return the exact times of some steps, and the steps in which the host waited for the GPU."""
    gpu, progress, found, waits = Gpu(), Progress(), [], []
    config, costs = little(run_dir), Costs(torch.device("cuda"), 1.0, 1.0)
    lessons = find_lessons("solution", config)
    sampler = lessons("training_state").ResumableSampler(21, 8, 0, None)
    strategy: Any = SimpleNamespace(replicas=None, computes=True)
    with (
        mock.patch.object(torch.cuda, "current_stream", return_value=gpu),
        mock.patch.object(torch.cuda, "synchronize", gpu.synchronize),
        mock.patch.object(telemetry, "Interval", side_effect=lambda _: Interval(CPU)),
        Telemetry(config, lessons, progress, sampler, costs, strategy) as told,
    ):
        told.timer.clock = lambda: gpu.now_s
        told.stragglers = SimpleNamespace(add=lambda t: found.append((progress.step, t)) or [])
        for step in range(1, num_steps + 1):
            before = gpu.num_waits
            with told.computing():
                gpu.start(SECOND)
                with told.waiting():
                    pass
                gpu.start(SECOND)
                progress.step += 1
            told.end_step(torch.zeros(()), 1, counts=True)
            waits += [step] * (gpu.num_waits > before)
    return found, waits


def test_a_tenth_of_the_steps_waits_for_the_gpu_from_beginning_to_end(tmp_path: Path) -> None:
    ((found, waits),) = on_ranks(timed, 1, tmp_path, 25, backend="gloo")
    times = StepTimes(2 * (SECOND + LAUNCH), 0.0, 2 * (SECOND + LAUNCH), 0.0)
    assert found == [(10, times), (20, times)]
    assert waits == [9, 10, 19, 20]  # at the end of step 9, step 10 begins


# --- heartbeats ----------------------------------------------------------------------------------


def step_when_resumed(run_dir: Path) -> int:
    run_dir.mkdir()
    config = little(run_dir)
    watching = Watch(config, find_lessons("solution", config), 7)
    watching.close()
    return watching.step


def test_a_resumed_rank_that_has_not_moved_yet_is_in_the_step_that_it_loaded(
    tmp_path: Path,
) -> None:
    assert on_ranks(step_when_resumed, 1, tmp_path / "run", backend="gloo") == [7]


def touches(run_dir: Path) -> list[float]:
    """Return the seconds at which a rank that is in ten steps per second touches its file."""
    clock, found = SimpleNamespace(s=0.0), []
    config = little(run_dir, heartbeat_timeout_s=1e9)
    lessons = find_lessons("solution", config)
    run_dir.mkdir()
    with (
        mock.patch.object(watch, "POLL_S", 1e6),  # the thread sleeps; this test does its work
        mock.patch.object(watch, "time", SimpleNamespace(monotonic=lambda: clock.s)),
        mock.patch.object(Path, "touch", side_effect=lambda: found.append(clock.s)),
    ):
        watching = Watch(config, lessons, 0)
        for step in range(1, 31):
            clock.s = step / 10
            before = len(found)
            watching.beat(step)
            assert len(found) == before, "a step must not wait for a slow file system"
            watching._report()
        clock.s = 9.0
        watching._report()  # of a rank that hangs
        watching.close()
    return found


def test_a_heartbeat_file_is_touched_once_a_second_while_the_rank_gets_on(tmp_path: Path) -> None:
    assert on_ranks(touches, 1, tmp_path / "run", backend="gloo") == [[0.0, 1.0, 2.0, 3.0]]
