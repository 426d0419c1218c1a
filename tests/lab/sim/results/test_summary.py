"""The summary of a run has the trace's numbers, in readable units, and the settings used."""

from typing import Any

import pytest
import torch.distributed as dist
from pictured import compute, overlapped, ring, run

from distlab.sim import Faults
from distlab.sim.results.summary import summary, totals
from distlab.util.text import seconds_text


def uneven() -> None:
    """Compute r + 1 times as long on rank r as on rank 0; no rank waits."""
    compute(1 + dist.get_rank())


@pytest.mark.parametrize("fn", [ring, overlapped, uneven])
def test_time_is_computation_and_waiting_and_nothing_else(fn: Any) -> None:
    simulated = run(fn, 4)
    for rank, what in enumerate(totals(simulated)):
        own = [e for e in simulated.trace.events if e.kind in ("compute", "wait")]
        last_s = max(event.end_s for event in own if event.rank == rank)
        assert what.time_s == pytest.approx(last_s, rel=1e-9)


def test_a_rank_that_is_done_early_is_idle() -> None:
    first, second = totals(run(uneven, 2))
    assert second.time_s == pytest.approx(2 * first.time_s)
    assert first.idle_s == pytest.approx(first.time_s)
    assert second.idle_s == 0


def test_of_many_ranks_the_spread_and_the_slowest_are_listed() -> None:
    simulated = run(overlapped, 20, faults=Faults(slow_ranks={7: 50.0}))
    lines = summary(simulated).splitlines()
    start = next(number for number, line in enumerate(lines) if line.lstrip().startswith("rank"))
    names = [line.split()[0] for line in lines[start + 1 : start + 5]]
    assert names == ["min", "median", "max", "7"]
    largest = max(simulated.trace.exposed_s)
    assert seconds_text(largest) in lines[start + 3]


def test_what_was_set_and_broken_on_purpose_is_listed() -> None:
    faults = Faults(
        slow_ranks={1: 2.0}, slow_links={"node0.gpu0.*": 10}, delays_s={(0, 1): 1e-3}, jitter_s=1e-6
    )
    text = summary(run(ring, 2, faults=faults, algorithm="ring", eager_bytes=2048))
    for line in (
        "node0.gpu0.* is 10 times slower",
        "built-in collectives: ring",
        "sends of up to 2.00 KiB are buffered",
        "rank 1 computes 2 times slower",
        "messages from rank 0 to rank 1 arrive 1.00 ms late",
        "every call starts up to 1.00 µs late",
    ):
        assert f"  {line}\n" in text
