"""Crowds: many flows end when the few would, and a crowd does no needless work."""

import random
from dataclasses import dataclass, field
from itertools import permutations
from math import inf

import numpy as np
import pytest
from random_flows import any_seed, random_case, run
from reference_solver import Arrival, finish_times

from distlab.sim.hardware.cluster import Cluster
from distlab.sim.network import crowd
from distlab.sim.network import flows as network
from distlab.sim.network.crowd import Floats, Links, fill_links
from distlab.sim.network.flows import Flow, Network, max_min_rates


def run_in(
    crowd_size: float, bytes_per_s: list[float], arrivals: list[Arrival]
) -> dict[int, float]:
    """Return the finish times, in order, if components of ``crowd_size`` flows are crowds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "CROWD", crowd_size)
        return run(bytes_per_s, arrivals)


def many_flows(seed: int) -> tuple[list[float], list[Arrival]]:
    """Up to 200 flows over up to 60 links, of sizes that are all different."""
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


def all_to_all(ranks: int) -> tuple[list[float], list[Arrival]]:
    """Every rank sends every other rank another number of bytes, on a fat tree, 4:1."""
    cluster = Cluster(ranks // 4, 4, topology="fat-tree", oversubscription=4)
    rng = random.Random(ranks)
    pairs = permutations(range(ranks), 2)
    routes = [cluster.route(src, dst).links for src, dst in pairs]
    arrivals = [Arrival(0.0, links, rng.uniform(1e6, 2e6)) for links in routes]
    return [link.bytes_per_s for link in cluster.links], arrivals


@dataclass
class Work:
    """What crowds have done: flows that `fill_links` was given, and the rounds of each call."""

    filled: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Count what crowds do from now on. Every component of two flows is one."""
    counted, offers = Work(), crowd._offers

    def fill(routes: Links, spare: Floats, levels: Floats) -> None:
        counted.filled.append(routes.shape[1])
        counted.rounds.append(0)
        fill_links(routes, spare, levels)

    def one_round(spare: Floats, growing: Floats) -> Floats:
        counted.rounds[-1] += 1
        return offers(spare, growing)

    monkeypatch.setattr(network, "CROWD", 2)
    monkeypatch.setattr(crowd, "fill_links", fill)
    monkeypatch.setattr(crowd, "_offers", one_round)
    return counted


def filled_rates(routes: list[tuple[int, ...]], bytes_per_s: list[float]) -> list[float]:
    """Return the rates of flows over ``routes`` by way of `fill_links`."""
    nowhere = len(bytes_per_s)
    width = max(map(len, routes))
    padded = [route + (nowhere,) * (width - len(route)) for route in routes]
    columns = np.array(padded, dtype=np.intp).T
    levels = np.full(nowhere + 1, inf)
    fill_links(columns, np.array([*bytes_per_s, inf]), levels)
    rates: list[float] = levels.take(columns).min(axis=0).tolist()
    return rates


# ---------------------------------------------------------------------------------- fill_links


@any_seed(100)
def test_filled_rates_of_many_flows_equal_those_of_max_min_rates(seed: int) -> None:
    bytes_per_s, arrivals = many_flows(seed)
    routes = [arrival.links for arrival in arrivals]
    expected = max_min_rates(routes, bytes_per_s)
    assert filled_rates(routes, bytes_per_s) == pytest.approx(expected, rel=1e-12)


# ------------------------------------------------------------------------------- finish times


@any_seed(100)
def test_a_crowd_of_any_size_ends_when_the_reference_does(seed: int) -> None:
    bytes_per_s, arrivals = random_case(seed)
    exact = [float(end) for end in finish_times(arrivals, bytes_per_s)]
    for size in (2, 3, 6):
        ended = run_in(size, bytes_per_s, arrivals)
        assert [ended[i] for i in range(len(ended))] == pytest.approx(exact, rel=1e-12, abs=0)


@any_seed(20)
def test_many_flows_end_in_crowds_as_they_do_one_by_one(seed: int) -> None:
    bytes_per_s, arrivals = many_flows(seed)
    expected = run_in(inf, bytes_per_s, arrivals)
    for size in (2, 16, 64):
        ended = run_in(size, bytes_per_s, arrivals)
        assert ended == pytest.approx(expected, rel=1e-12, abs=0)
        assert list(ended) == list(expected)


def test_an_end_stays_exact_while_the_rate_stays(work: Work) -> None:
    # Newcomers on link 1 come and go; both flows on link 0 keep half of it all the time.
    net = Network([1.0, 100.0])
    short, long = net.start((0, 1), 7.7, 0.0), net.start((0,), 9.0, 0.0)
    for k in range(1, 100):
        net.start((1,), 1.0, k * 0.15)
    assert net.pop_finished(15.4)[-1] is short
    assert short.finish_s == 2 * 7.7
    assert net.pop_finished(20.0) == [long]


# ------------------------------------------------------------------- who belongs to which crowd


def crowds_of(flows: list[Flow]) -> int:
    assert all(flow.crowd for flow in flows)
    return len({id(flow.crowd) for flow in flows})


def test_what_is_left_of_a_crowd_falls_apart_into_its_components(work: Work) -> None:
    # The flow over both links ends first; once half have ended, each link is on its own.
    net = Network([10.0, 10.0])
    flows = [net.start((0, 1), 1.0, 0.0)]
    flows += [net.start((link,), size, 0.0) for size in (2.0, 9.0, 10.0) for link in (0, 1)]
    net.next_finish_s()
    assert crowds_of(flows) == 1
    assert net.pop_finished(net.next_finish_s()) == flows[:1]
    net.next_finish_s()
    assert crowds_of(flows[1:]) == 1
    for _ in range(2):
        net.pop_finished(net.next_finish_s())
    net.next_finish_s()
    assert work.filled[:3] == [7, 6, 4]
    assert [flow.crowd for flow in flows] == [None] * 7


# ---------------------------------------------------------------------------------------- work


def test_rates_below_those_of_who_has_ended_are_not_computed_again(work: Work) -> None:
    # Link 0 gives 1 byte/s to each of ten; link 1 the 9 that remain to a, then nobody needs more.
    net = Network([10.0, 10.0])
    slow = [net.start((0,), 100.0, 0.0) for _ in range(9)]
    slow.append(net.start((0, 1), 100.0, 0.0))
    fast = [net.start((1,), size, 0.0) for size in (9.0, 18.0)]
    assert net.pop_finished(net.next_finish_s()) == fast[:1]
    net.next_finish_s()
    assert [flow.rate for flow in slow] == [1.0] * 10
    assert fast[1].rate == 9.0
    assert work.filled == [12, 1]


def test_an_unequal_all_to_all_takes_one_solve_an_end_and_few_rounds(work: Work) -> None:
    bytes_per_s, arrivals = all_to_all(16)
    assert len(run(bytes_per_s, arrivals)) == 240
    assert len(work.filled) <= 240 + 4  # every end, and the first share in each node
    assert sum(work.filled) <= 192 * 192 / 2
    assert sum(work.rounds) <= 3 * len(work.rounds)
