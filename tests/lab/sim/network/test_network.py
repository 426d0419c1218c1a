"""Flows in a network: shares are fair, finish times are right, and nothing gets lost."""

import random
from fractions import Fraction
from math import inf, ulp

import pytest
from random_flows import any_seed, events, random_case, run
from reference_solver import fair_rates, finish_times

from distlab.sim.network.flows import Network, max_min_rates


@pytest.fixture(params=["one by one", "in crowds"], autouse=True)
def regime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test twice: without crowds, and with components of 2 or more flows as crowds."""
    size = 2 if request.param == "in crowds" else 10**9
    monkeypatch.setattr("distlab.sim.network.flows.CROWD", size)


def assert_max_min(
    routes: list[tuple[int, ...]], rates: list[float], bytes_per_s: list[float]
) -> None:
    """Check that no link is overloaded, and each flow is among the fastest on some full link."""
    on_link: dict[int, list[float]] = {link: [] for link in range(len(bytes_per_s))}
    for route, rate in zip(routes, rates, strict=True):
        for link in route:
            on_link[link].append(rate)
    full = set()
    for link, shares in on_link.items():
        assert sum(shares) <= bytes_per_s[link] * (1 + 1e-9), f"link {link} is over its capacity"
        if sum(shares) >= bytes_per_s[link] * (1 - 1e-9):
            full.add(link)
    for route, rate in zip(routes, rates, strict=True):
        assert any(link in full and rate >= max(on_link[link]) * (1 - 1e-9) for link in route), (
            f"the flow over {route} could get more than {rate}"
        )


# ------------------------------------------------------------------------------- max_min_rates


@any_seed(50)
def test_rates_equal_those_of_the_reference(seed: int) -> None:
    bytes_per_s, arrivals = random_case(seed, num_flows=20)
    routes = [arrival.links for arrival in arrivals]
    exact = fair_rates(routes, [Fraction(value) for value in bytes_per_s])
    assert max_min_rates(routes, bytes_per_s) == pytest.approx([float(r) for r in exact], rel=1e-12)


# ------------------------------------------------------------------------- flows that do not share


@any_seed(20)
def test_a_flow_alone_ends_exactly_at_bytes_over_bandwidth(seed: int) -> None:
    rng = random.Random(seed)
    bytes_per_s = [rng.uniform(1e8, 1e12) for _ in range(4)]
    network, now_s = Network(bytes_per_s), rng.uniform(0, 10)
    num_bytes = rng.uniform(1, 1e9)
    flow = network.start((0, 2, 3), num_bytes, now_s)
    expected_s = now_s + num_bytes / min(bytes_per_s[link] for link in (0, 2, 3))
    assert network.next_finish_s() == expected_s
    assert network.pop_finished(expected_s - 2 * ulp(expected_s)) == []
    assert network.pop_finished(expected_s) == [flow]
    assert network.next_finish_s() == inf


def test_no_bytes_or_no_links_end_at_once_and_take_nothing_from_others() -> None:
    network = Network([10.0])
    busy = network.start((0,), 100.0, 0.0)
    empty, local = network.start((0,), 0.0, 2.0), network.start((), 5.0, 2.0)
    assert network.next_finish_s() == 2.0
    assert network.pop_finished(2.0) == [empty, local]
    assert network.pop_finished(10.0) == [busy]
    assert network.bytes_by_link == [100.0]


# ------------------------------------------------------------------------------ flows that share


def test_the_timeline_of_the_module_docstring() -> None:
    network = Network([10.0])
    first = network.start((0,), 100.0, 0.0)
    second = network.start((0,), 100.0, 5.0)
    assert network.next_finish_s() == 15.0
    assert (first.rate, second.rate) == (5.0, 5.0)
    assert network.pop_finished(15.0) == [first]
    assert network.next_finish_s() == 20.0
    assert second.rate == 10.0
    assert network.pop_finished(20.0) == [second]


@any_seed(100)
def test_finish_times_equal_those_of_the_reference(seed: int) -> None:
    bytes_per_s, arrivals = random_case(seed)
    ended = run(bytes_per_s, arrivals)
    exact = finish_times(arrivals, bytes_per_s)
    assert sorted(ended) == list(range(len(arrivals)))
    for index, finish_s in ended.items():
        assert finish_s == pytest.approx(float(exact[index]), rel=1e-12, abs=0)


@any_seed(100)
def test_every_allocation_is_max_min_fair(seed: int) -> None:
    bytes_per_s, arrivals = random_case(seed)
    network = Network(bytes_per_s)
    for _, in_flight in events(network, arrivals):
        network.next_finish_s()  # updates the rates
        moving = [flow for flow in in_flight if flow.num_bytes]
        assert_max_min([flow.links for flow in moving], [f.rate for f in moving], bytes_per_s)


def test_a_start_in_the_future_lets_earlier_flows_end_at_their_own_time() -> None:
    network = Network([10.0])
    first = network.start((0,), 40.0, 0.0)
    second = network.start((0,), 40.0, 6.0)
    assert network.next_finish_s() == 4.0
    assert network.pop_finished(6.0) == [first]
    assert network.pop_finished(10.0) == [second]


# -------------------------------------------------------------------------------------- errors


def test_time_never_runs_backwards() -> None:
    network = Network([1.0])
    network.start((0,), 1.0, 5.0)
    message = r"time runs backwards: 4\.0 s after 5\.0 s"
    with pytest.raises(ValueError, match=message):
        network.start((0,), 1.0, 4.0)
    with pytest.raises(ValueError, match=message):
        network.pop_finished(4.0)


@pytest.mark.parametrize("value", [0.0, -1.0, inf, float("nan")])
def test_a_bandwidth_must_be_positive_and_finite(value: float) -> None:
    with pytest.raises(ValueError, match=f"link 1 needs a finite bandwidth .* got {value}"):
        Network([1.0, value])
