"""Flows that are handled together, in crowds, end at the same times as if handled one by one."""

import random
from math import inf

import pytest
from random_flows import any_seed, random_case, run
from reference_solver import Arrival, finish_times

from distlab.sim.network import flows as network


def run_in(
    crowd_size: float, bytes_per_s: list[float], arrivals: list[Arrival]
) -> dict[int, float]:
    """Treat components of ``crowd_size`` or more flows as crowds; return finish times, in order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "CROWD", crowd_size)
        return run(bytes_per_s, arrivals)


def many_flows(seed: int) -> tuple[list[float], list[Arrival]]:
    """Draw up to 200 flows, all of different sizes, over up to 60 links."""
    rng = random.Random(seed)
    bytes_per_s = [rng.choice([1.0, 2.0, rng.uniform(0.5, 9)]) for _ in range(rng.randint(4, 60))]
    longest = rng.randint(1, 4)
    arrivals = [
        Arrival(
            start_s=rng.choice([0.0, 0.0, 1.0, rng.uniform(0, 30)]),
            links=tuple(rng.sample(range(len(bytes_per_s)), rng.randint(1, longest))),
            num_bytes=rng.uniform(1, 50),
        )
        for _ in range(rng.randint(1, 200))
    ]
    return bytes_per_s, sorted(arrivals, key=lambda arrival: arrival.start_s)


# ------------------------------------------------------------------------------- finish times


@any_seed(50)
def test_a_crowd_of_any_size_ends_when_the_reference_does(seed: int) -> None:
    bytes_per_s, arrivals = random_case(seed)
    exact = [float(end) for end in finish_times(arrivals, bytes_per_s)]
    for size in (2, 3, 6):
        ended = run_in(size, bytes_per_s, arrivals)
        assert [ended[i] for i in range(len(ended))] == pytest.approx(exact, rel=1e-12, abs=0)


@any_seed(10)
def test_many_flows_end_in_crowds_as_they_do_one_by_one(seed: int) -> None:
    bytes_per_s, arrivals = many_flows(seed)
    expected = run_in(inf, bytes_per_s, arrivals)
    for size in (2, 16):
        ended = run_in(size, bytes_per_s, arrivals)
        assert ended == pytest.approx(expected, rel=1e-12, abs=0)
        assert list(ended) == list(expected)
