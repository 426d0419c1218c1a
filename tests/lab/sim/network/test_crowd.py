"""Crowds: many flows end when the few would, and a crowd does no needless work."""

import random
from itertools import permutations
from math import inf

import pytest
from random_flows import any_seed, random_case, run
from reference_solver import Arrival, finish_times

from distlab.sim.hardware.cluster import Cluster
from distlab.sim.network import crowd
from distlab.sim.network import flows as network
from distlab.sim.network.crowd import Floats, Links, fill_links
from distlab.sim.network.flows import Network


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


def test_an_end_stays_exact_while_the_rate_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "CROWD", 2)
    # Newcomers on link 1 come and go; both flows on link 0 keep half of it all the time.
    net = Network([1.0, 100.0])
    short, long = net.start((0, 1), 7.7, 0.0), net.start((0,), 9.0, 0.0)
    for k in range(1, 100):
        net.start((1,), 1.0, k * 0.15)
    assert net.pop_finished(15.4)[-1] is short
    assert short.finish_s == 2 * 7.7
    assert net.pop_finished(20.0) == [long]


# ---------------------------------------------------------------------------------------- work


def test_an_unequal_all_to_all_takes_one_solve_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []  # flows of each solve

    def fill(routes: Links, spare: Floats, levels: Floats) -> None:
        filled.append(routes.shape[1])
        fill_links(routes, spare, levels)

    monkeypatch.setattr(network, "CROWD", 2)
    monkeypatch.setattr(crowd, "fill_links", fill)
    assert len(run(*all_to_all(16))) == 240
    assert len(filled) <= 240 + 4  # every end, and the first share in each node
    assert sum(filled) <= 192 * 192 / 2
