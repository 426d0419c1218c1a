"""distlab.sim.network.flows: shares are fair, finish times are right, nothing gets lost."""

import random
from fractions import Fraction
from math import inf, ulp

import pytest
from random_flows import any_seed, events, random_case, run
from reference_solver import Arrival, fair_rates, finish_times

from distlab.sim.network.flows import Network, max_min_rates


@pytest.fixture(params=["one by one", "in crowds"], autouse=True)
def regime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs twice: no component is a crowd, and every one of two flows is."""
    size = 2 if request.param == "in crowds" else 10**9
    monkeypatch.setattr("distlab.sim.network.flows.CROWD", size)


one_by_one = pytest.mark.parametrize("regime", ["one by one"], indirect=True)


def assert_max_min(
    routes: list[tuple[int, ...]], rates: list[float], bytes_per_s: list[float]
) -> None:
    """No link carries too much; every flow has a full link on which nobody has more than it."""
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


def test_rates_of_the_example_in_the_docstring() -> None:
    assert max_min_rates([(0,), (0, 1), (1,)], [10.0, 4.0]) == [8.0, 2.0, 2.0]


def test_rates_of_no_flow_and_of_an_empty_route() -> None:
    assert max_min_rates([], [1.0]) == []
    assert max_min_rates([(), (0,)], [1.0]) == [inf, 1.0]


@pytest.mark.parametrize("number", [1, 2, 3, 7, 1000])
def test_equal_flows_get_equal_shares(number: int) -> None:
    assert max_min_rates([(0, 1)] * number, [9.0, 6.0]) == [6.0 / number] * number


def test_rounding_does_not_part_what_is_equal() -> None:
    # Both long flows have three neighbours of 0.1 bytes/s each. One link loses 3 x 0.1 at a time,
    # the other 0.1 three times: 0.7 and 0.7000000000000001 in floats.
    bytes_per_s = [1.0, 1.0, 0.3, 0.1, 0.1, 0.1]
    neighbours = [(0, 2), (0, 2), (0, 2), (1, 3), (1, 4), (1, 5)]
    first, second, *_ = max_min_rates([(0,), (1,), *neighbours], bytes_per_s)
    assert first == second == pytest.approx(0.7)


@any_seed(50)
def test_rates_equal_those_of_the_reference(seed: int) -> None:
    bytes_per_s, arrivals = random_case(seed, num_flows=20)
    routes = [arrival.links for arrival in arrivals]
    exact = fair_rates(routes, [Fraction(value) for value in bytes_per_s])
    assert max_min_rates(routes, bytes_per_s) == pytest.approx([float(r) for r in exact], rel=1e-12)


@any_seed(50)
def test_more_bandwidth_anywhere_never_lowers_the_smallest_rate(seed: int) -> None:
    bytes_per_s, arrivals = random_case(seed)
    routes = [arrival.links for arrival in arrivals]
    smallest = min(max_min_rates(routes, bytes_per_s))
    for link in range(len(bytes_per_s)):
        faster = [value * 1.5 if i == link else value for i, value in enumerate(bytes_per_s)]
        assert min(max_min_rates(routes, faster)) >= smallest * (1 - 1e-12)


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


def test_disjoint_flows_do_not_disturb_each_other() -> None:
    network = Network([3.0, 7.0])
    first, second = network.start((0,), 10.0, 0.0), network.start((1,), 10.0, 1.0)
    assert (first.finish_s, second.finish_s) == (10 / 3, 1 + 10 / 7)


def test_a_ring_step_of_256_ranks_ends_at_one_instant() -> None:
    # Rank r sends over its own way out (2r) and its neighbour's way in: nothing is shared.
    network = Network([1e9] * 512)
    for step in range(3):
        now_s = step * 1e-3
        for rank in range(256):
            network.start((2 * rank, 2 * ((rank + 1) % 256) + 1), 1e6, now_s)
        assert network.next_finish_s() == now_s + 1e6 / 1e9
        assert len(network.pop_finished(now_s + 1e6 / 1e9)) == 256


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


@any_seed(200)
def test_finish_times_equal_those_of_the_reference(seed: int) -> None:
    bytes_per_s, arrivals = random_case(seed)
    ended = run(bytes_per_s, arrivals)
    exact = finish_times(arrivals, bytes_per_s)
    assert sorted(ended) == list(range(len(arrivals)))
    for index, finish_s in ended.items():
        assert finish_s == pytest.approx(float(exact[index]), rel=1e-12, abs=0)


@any_seed(200)
def test_every_allocation_is_max_min_fair(seed: int) -> None:
    bytes_per_s, arrivals = random_case(seed)
    network = Network(bytes_per_s)
    for _, in_flight in events(network, arrivals):
        network.next_finish_s()  # now the rates are settled
        moving = [flow for flow in in_flight if flow.num_bytes]
        assert_max_min([flow.links for flow in moving], [f.rate for f in moving], bytes_per_s)


@any_seed(200)
def test_links_carry_the_bytes_of_their_flows_and_no_more(seed: int) -> None:
    bytes_per_s, arrivals = random_case(seed)
    network = Network(bytes_per_s)
    ended = [flow for some, _ in events(network, arrivals) for flow in some]
    assert len(ended) == len(arrivals)
    for link, carried in enumerate(network.bytes_by_link):
        expected = sum(arrival.num_bytes for arrival in arrivals if link in arrival.links)
        assert carried == pytest.approx(expected)
    assert all(flow.remaining_bytes == flow.rate == 0 for flow in ended)


@any_seed(30)
def test_twice_the_bandwidth_takes_half_the_time(seed: int) -> None:
    bytes_per_s, arrivals = random_case(seed)
    at_once = [Arrival(0.0, arrival.links, arrival.num_bytes) for arrival in arrivals]
    slow = run(bytes_per_s, at_once)
    fast = run([2 * value for value in bytes_per_s], at_once)
    assert fast == {index: pytest.approx(finish_s / 2) for index, finish_s in slow.items()}


@any_seed(30)
def test_the_numbers_of_links_and_flows_do_not_matter(seed: int) -> None:
    bytes_per_s, arrivals = random_case(seed)
    rng = random.Random(seed)
    new_link = rng.sample(range(len(bytes_per_s)), len(bytes_per_s))
    renamed = [0.0] * len(bytes_per_s)
    for link, value in enumerate(bytes_per_s):
        renamed[new_link[link]] = value
    order = sorted(range(len(arrivals)), key=lambda i: (arrivals[i].start_s, rng.random()))
    shuffled = [
        Arrival(
            arrivals[i].start_s,
            tuple(new_link[link] for link in arrivals[i].links),
            arrivals[i].num_bytes,
        )
        for i in order
    ]
    expected, ended = run(bytes_per_s, arrivals), run(renamed, shuffled)
    for position, original in enumerate(order):
        assert ended[position] == pytest.approx(expected[original], rel=1e-9)


@any_seed(10)
def test_two_runs_are_bitwise_equal(seed: int) -> None:
    case = random_case(seed)
    assert list(run(*case).items()) == list(run(*case).items())


def test_flows_that_end_together_come_in_the_order_of_their_starts() -> None:
    network = Network([8.0])
    flows = [network.start((0,), 2.0, 0.0) for _ in range(4)]
    assert network.next_finish_s() == 1.0
    assert network.pop_finished(1.0) == flows


def test_what_ended_earlier_comes_first_and_keeps_its_time() -> None:
    # The caller slept until 9 s: two flows have ended meanwhile, the second at full speed.
    network = Network([10.0])
    long, short = network.start((0,), 40.0, 0.0), network.start((0,), 20.0, 0.0)
    assert network.pop_finished(9.0) == [short, long]
    assert (short.finish_s, long.finish_s) == (4.0, 6.0)


def test_a_start_in_the_future_lets_earlier_flows_end_at_their_own_time() -> None:
    network = Network([10.0])
    first = network.start((0,), 40.0, 0.0)
    second = network.start((0,), 40.0, 6.0)
    assert network.next_finish_s() == 4.0
    assert network.pop_finished(6.0) == [first]
    assert network.pop_finished(10.0) == [second]


def test_equal_finish_times_that_only_rounding_makes_equal_keep_the_order_too() -> None:
    # Both have 0.1 bytes left at 0.5 s; once the second has ended, nothing is left of the first.
    network = Network([3.0])
    flows = [network.start((0,), 1.0, 0.2), network.start((0,), 0.1, 0.5)]
    assert network.pop_finished(1.0) == flows
    assert flows[0].finish_s == flows[1].finish_s


@one_by_one
def test_a_component_is_solved_once_per_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    # A parameter server: 255 workers push at once; every fifth pushes half as much.
    solves: list[int] = []

    def counted(routes: list[tuple[int, ...]], bytes_per_s: list[float]) -> list[float]:
        solves.append(len(routes))
        return max_min_rates(routes, bytes_per_s)

    monkeypatch.setattr("distlab.sim.network.flows.max_min_rates", counted)
    network = Network([100.0] * 256)
    for worker in range(255):
        network.start((worker, 255), 50.0 if worker % 5 == 0 else 100.0, 0.0)
    assert network.next_finish_s() == pytest.approx(51 / 2 * 5)
    assert len(network.pop_finished(network.next_finish_s())) == 51
    assert len(network.pop_finished(network.next_finish_s())) == 204
    assert solves == [255, 204, 0]  # nobody is left to share with after the last instant


@one_by_one
def test_only_the_component_is_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # 0 ─ 1 ─ 2 are joined by the flow over (0, 1) and the one over (1, 2); link 3 is apart.
    solved: list[list[tuple[int, ...]]] = []

    def recorded(routes: list[tuple[int, ...]], bytes_per_s: list[float]) -> list[float]:
        solved.append(sorted(routes))
        return max_min_rates(routes, bytes_per_s)

    monkeypatch.setattr("distlab.sim.network.flows.max_min_rates", recorded)
    network = Network([10.0] * 4)
    for links in [(0, 1), (1, 2), (3,)]:
        network.start(links, 100.0, 0.0)
    network.next_finish_s()
    network.start((3,), 1.0, 1.0)
    network.next_finish_s()
    assert solved == [[(0, 1), (1, 2)], [(3,), (3,)]]


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


def test_a_flow_cannot_have_fewer_than_no_bytes() -> None:
    with pytest.raises(ValueError, match="0 or more bytes, got -1"):
        Network([1.0]).start((0,), -1.0, 0.0)


def test_a_flow_prints_what_it_is() -> None:
    flow = Network([4.0, 2.0]).start((0, 1), 1e6, 0.0)
    assert repr(flow) == "Flow(1e+06 bytes over (0, 1), 2 bytes/s)"
