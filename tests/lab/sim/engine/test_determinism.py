"""A program's history is the same, down to the last event, in every run and every process."""

import contextlib
import random
import sys
import time
from collections.abc import Iterator

import pytest
from everything import a_bit_of_everything
from programs import me

from distlab import launch
from distlab.sim import simulate

really_sleep = time.sleep


def noisy() -> list[object]:
    """Run a bit of everything, with random pauses in real time before and after."""
    noise = random.Random(time.time_ns() + me())
    really_sleep(noise.random() * 2e-3)
    results = a_bit_of_everything()
    really_sleep(noise.random() * 2e-3)
    return results


@contextlib.contextmanager
def switching_every(seconds: float) -> Iterator[None]:
    """Make Python switch threads at this interval while the body runs."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("cluster", [None, "dgx-h100"])
def test_history_and_results_are_the_same_every_time(cluster: str | None) -> None:
    runs = [simulate(a_bit_of_everything, 6, cluster=cluster)]
    for interval, program in ((1e-6, a_bit_of_everything), (1e-6, noisy), (0.5, noisy)):
        with switching_every(interval):
            runs.append(simulate(program, 6, cluster=cluster))
    assert len({run.trace.digest() for run in runs}) == 1
    assert all(run.results == runs[0].results for run in runs)
    assert len({run.seconds for run in runs}) == 1


def test_history_is_the_same_in_another_process() -> None:
    here, there = simulate(a_bit_of_everything, 6), launch.simulate(a_bit_of_everything, 6)
    assert here.trace.digest() == there.trace.digest()
    assert here.results == there.results
