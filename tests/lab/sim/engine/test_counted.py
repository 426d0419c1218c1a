"""A trace that only counts has the totals, reports and times of a full one, but no events."""

import pytest
import torch
import torch.distributed as dist

from distlab.sim import Options, Trace, simulate

COUNTED = Options(has_events=False)


def exchanges(rounds: int) -> float:
    me, size = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(4), torch.zeros(4)
    for _ in range(rounds):
        work = dist.isend(x, (me + 1) % size)
        dist.recv(y, (me - 1) % size)
        if work is not None:
            work.wait()
        dist.all_reduce(y)
    return y.sum().item()


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_totals_are_those_of_the_events(num_ranks: int) -> None:
    kept = simulate(exchanges, num_ranks, 3)
    counted = simulate(exchanges, num_ranks, 3, options=COUNTED)
    assert (counted.results, counted.seconds) == (kept.results, kept.seconds)
    without = {"_rows", "has_events"}
    states = [
        {k: v for k, v in one.trace.state().items() if k not in without} for one in (kept, counted)
    ]
    assert states[0] == states[1]
    assert counted.trace.arrived() == {(src, (src + 1) % num_ranks): 3 for src in range(num_ranks)}


def test_events_that_were_only_counted_cannot_be_asked_for() -> None:
    trace = simulate(exchanges, 2, 1, options=COUNTED).trace
    with pytest.raises(
        ValueError, match="only counted: simulate with Options\\(has_events=True\\)"
    ):
        _ = trace.events
    sent = Trace.of_state(trace.state())
    assert sent.messages == trace.messages
