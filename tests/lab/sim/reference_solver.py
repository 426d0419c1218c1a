"""An independent computation of finish times: in exact fractions, from scratch at every event.

It shares no code and no algorithm with distlab.sim.network.flows. There, rates grow until links are
full. Here, each link announces a fair share, and each flow takes the smallest share announced on
its route. This is repeated until no announcement changes. The method is slow, and meant for a dozen
flows.

Source: Charny, Clark and Jain 1995, Congestion control with explicit rate indication.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass
class Arrival:
    """A flow that starts at ``start_s``; the tests draw such flows at random."""

    start_s: float
    links: tuple[int, ...]
    num_bytes: float


def finish_times(arrivals: Sequence[Arrival], bytes_per_s: Sequence[float]) -> list[Fraction]:
    """Return the exact time at which each flow ends."""
    bandwidths = [Fraction(value) for value in bytes_per_s]
    left = [Fraction(arrival.num_bytes) for arrival in arrivals]
    ends = [Fraction(arrival.start_s) for arrival in arrivals]  # final for flows without bytes
    now = Fraction(0)
    while any(left):
        started = [f for f, a in enumerate(arrivals) if left[f] and Fraction(a.start_s) <= now]
        rates = fair_rates([arrivals[f].links for f in started], bandwidths)
        events = [Fraction(a.start_s) for a in arrivals if Fraction(a.start_s) > now]
        events += [now + left[f] / rate for f, rate in zip(started, rates, strict=True)]
        step = min(events) - now
        now = min(events)
        for flow, rate in zip(started, rates, strict=True):
            left[flow] -= rate * step
            ends[flow] = now
    return ends


def fair_rates(routes: Sequence[tuple[int, ...]], bandwidths: Sequence[Fraction]) -> list[Fraction]:
    """Return the max-min fair rates, found by announcing shares until none of them changes."""
    used = {link for route in routes for link in route}
    announced: dict[int, Fraction | None] = dict.fromkeys(used)  # None: no limit
    while True:
        renewed = {
            link: _fair_share(
                bandwidths[link],
                [_smallest(announced, route, link) for route in routes if link in route],
            )
            for link in used
        }
        if renewed == announced:
            return [_known(_smallest(announced, route)) for route in routes]
        announced = renewed


def _smallest(
    announced: dict[int, Fraction | None], route: tuple[int, ...], apart_from: int | None = None
) -> Fraction | None:
    offers = [announced[link] for link in route if link != apart_from]
    return min((offer for offer in offers if offer is not None), default=None)


def _fair_share(bandwidth: Fraction, wanted: list[Fraction | None]) -> Fraction | None:
    """Return the level for which the sum of min(level, want) fills the link; None if none does."""
    modest = sorted(want for want in wanted if want is not None)
    hungry = len(wanted)
    for want in modest:
        if want * hungry >= bandwidth:
            break
        bandwidth -= want
        hungry -= 1
    return bandwidth / hungry if hungry else None


def _known(rate: Fraction | None) -> Fraction:
    assert rate is not None, "a flow without a bottleneck"
    return rate
