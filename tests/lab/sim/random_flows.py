"""Random flows for the tests of networks and crowds."""

import random
from collections.abc import Callable, Iterator
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from reference_solver import Arrival

from distlab.sim.network.flows import Flow, Network


def any_seed(number: int) -> Callable[[Callable[[int], None]], Callable[[], None]]:
    """Return a decorator that runs a test with ``number`` seeds, the same ones every time."""
    chosen = given(seed=st.integers(0, 2**32))
    return lambda test: settings(max_examples=number, derandomize=True, deadline=None)(chosen(test))


def random_case(seed: int, num_flows: int = 12) -> tuple[list[float], list[Arrival]]:
    """Draw bandwidths, and up to ``num_flows`` flows over 2 to 8 links; some start together."""
    rng = random.Random(seed)
    bytes_per_s = [float(rng.choice([1, 2, 3, 5, 10, rng.uniform(0.5, 9)])) for _ in range(8)]
    links = range(rng.randint(2, 8))
    arrivals = [
        Arrival(
            start_s=rng.choice([0.0, 1.0, 2.0, rng.uniform(0, 5)]),
            links=tuple(rng.sample(links, rng.randint(1, min(4, len(links))))),
            num_bytes=float(rng.choice([0, 1, 10, 10, 40, rng.uniform(1, 50)])),
        )
        for _ in range(rng.randint(1, num_flows))
    ]
    return bytes_per_s, sorted(arrivals, key=lambda arrival: arrival.start_s)


def events(network: Network, arrivals: list[Arrival]) -> Iterator[tuple[list[Flow], list[Flow]]]:
    """Run all arrivals to the end; at each event, yield the flows that ended and those in flight.

    A flow's tag is the index of its arrival.
    """
    waiting = list(enumerate(arrivals))
    in_flight: list[Flow] = []
    while waiting or network.next_finish_s() < inf:
        now_s = min(network.next_finish_s(), waiting[0][1].start_s if waiting else inf)
        ended = network.pop_finished(now_s)
        while waiting and waiting[0][1].start_s == now_s:
            index, arrival = waiting.pop(0)
            in_flight.append(network.start(arrival.links, arrival.num_bytes, now_s))
            in_flight[-1].tag = index
        in_flight = [flow for flow in in_flight if flow not in ended]
        yield ended, in_flight


def run(bytes_per_s: list[float], arrivals: list[Arrival]) -> dict[int, float]:
    """Return each arrival's finish time by its index, sorted by finish time."""
    steps = events(Network(bytes_per_s), arrivals)
    return {index_of(flow): flow.finish_s for ended, _ in steps for flow in ended}


def index_of(flow: Flow) -> int:
    assert isinstance(flow.tag, int)
    return flow.tag
