"""What ranks did in a cell, as a picture."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from matplotlib.figure import Figure

from distlab.sim import Lap, Options, Session
from distlab.sim.engine.trace import Event, Trace
from distlab.sim.results.diagram import space_time
from distlab.sim.results.gpu_time import GpuTime, OnTrack
from distlab.sim.results.simulated import Simulated

NOTHING = "the last cell sent nothing and took no virtual time: there is nothing to draw"


def lanes(session: Session, lap: Lap[Any], title: str) -> Figure:
    """Draw what the ranks did in a run of a session, which begins at 0.

    Raises:
        ValueError: The ranks did nothing that takes time.
    """
    if not (lap.events or lap.tracks or lap.cut_short):
        raise ValueError(NOTHING)
    return space_time(_simulated(session, lap), title, lap.cut_short)


def _simulated(session: Session, lap: Lap[Any]) -> Simulated[None]:
    """Return a run as if it were a simulation of its own."""
    trace = Trace(session.num_ranks)
    for event in _with_sends([_since(lap.start_s, event) for event in lap.events]):
        trace.record(event)
    tracks = [OnTrack(name, _since(lap.start_s, event)) for name, event in lap.tracks]
    seconds = max([lap.seconds, *(event.end_s for _, event in tracks)])
    return Simulated(
        results=[None] * session.num_ranks,
        trace=trace,
        seconds=seconds,
        cluster=session.cluster,
        options=_since_start(session.options, lap.start_s, seconds),
        flops=[],
        gpu_time=GpuTime([], [], tracks=tracks) if session.options.semantics == "nccl" else None,
    )


def _since(start_s: float, event: Event) -> Event:
    """Return an event in the time of a run; one that began before it begins with it."""
    return event._replace(start_s=max(0.0, event.start_s - start_s), end_s=event.end_s - start_s)


def _with_sends(events: Iterable[Event]) -> Iterator[Event]:
    """Yield events and, for messages that were buffered before the run, sends at its beginning."""
    sent = {event.message for event in events if event.kind == "send"}
    for event in events:
        yield event
        if event.kind == "recv" and event.message not in sent:
            yield event._replace(
                rank=event.peer, kind="send", start_s=0.0, end_s=0.0, peer=event.rank
            )


def _since_start(options: Options, start_s: float, seconds: float) -> Options:
    """Return options with the deaths of a run, in its time."""
    deaths = {rank: at_s - start_s for rank, at_s in options.faults.kill_ranks.items()}
    inside = {rank: at_s for rank, at_s in deaths.items() if 0 <= at_s <= seconds}
    faults = dataclasses.replace(options.faults, kill_ranks=inside)
    return dataclasses.replace(options, faults=faults)
