"""Export a simulated run to other tools: Perfetto, Holistic Trace Analysis, a spreadsheet.

    rank 0   compute            ████ wait ████
             communication 1         send ┄┄┐
    rank 1   compute            ██ wait ██  ┊
             communication 1      recv ◀┄┄┄┄┘

A trace file has the format of torch's profiler (Kineto): a process per rank, with one thread for
computation and as many threads for communication as there were concurrent operations. With NCCL's
semantics, it has one for the host, and one for each stream.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from distlab.sim.engine.trace import Event, departure_s, lanes
from distlab.sim.results.simulated import Simulated
from distlab.sim.results.summary import assumed, label, link_use, settings

Json = dict[str, Any]
Thread = tuple[str, list[Event]]  # name and events
Placed = tuple[Event, Json]  # an event and its slice in a trace file

COMPUTE = 1  # thread for computation ("stream" in Kineto); communication has threads 2, 3, …
HOST = "host"  # name of that thread with NCCL's semantics, where streams compute
WRITTEN_DIGITS = 3  # decimal places of microseconds; viewers resolve nanoseconds


def write_trace(simulated: Simulated[Any], path: Path) -> None:
    """Write the events of all ranks to one file, for https://ui.perfetto.dev or chrome://tracing."""
    path.write_text(json.dumps(chrome_trace(simulated)))


def write_traces(simulated: Simulated[Any], folder: Path) -> None:
    """Write a file per rank into a folder, for Holistic Trace Analysis.

    Set HTA_DISABLE_NS_ROUNDING=1, because HTA otherwise rounds events to microseconds, and run:
        TraceAnalysis(trace_dir=folder).get_comm_comp_overlap()
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank, trace in enumerate(kineto_traces(simulated)):
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))


def write_links(simulated: Simulated[Any], path: Path) -> None:
    """Write a CSV file with the bytes, bandwidth and utilisation of each link."""
    trace, cluster = simulated.trace, simulated.cluster
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("link", "bytes", "bytes_per_s", "busy_share"))
        for num_bytes, link, (share, _) in zip(
            trace.bytes_by_link, cluster.links, link_use(simulated), strict=True
        ):
            table.writerow((link.name, round(num_bytes), f"{link.bytes_per_s:.0f}", f"{share:.6f}"))


def chrome_trace(simulated: Simulated[Any]) -> Json:
    """Return all ranks' events, and an arrow from every send to its recv, as JSON."""
    threads = [_threads(simulated, rank, events) for rank, events in enumerate(_by_rank(simulated))]
    placed = [place for of_rank in threads for place in _placed(of_rank)]
    slices = [entry for _, entry in placed]
    return {
        "displayTimeUnit": "ns",
        "otherData": {
            "label": label(simulated),
            "assumed": assumed(simulated),
            "set": settings(simulated.cluster, simulated.options),
        },
        "traceEvents": [
            *_names(simulated, threads),
            *slices,
            *_arrows(simulated, placed),
        ],
    }


def kineto_traces(simulated: Simulated[Any]) -> Iterator[Json]:
    """Yield each rank's trace, with event names that analysis tools recognise as kernels."""
    ranks = len(simulated.results)
    for rank, events in enumerate(_by_rank(simulated)):
        yield {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "sim", "rank": rank, "world_size": ranks},
            "otherData": {"label": label(simulated)},
            "traceEvents": [
                _as_kernel(event, entry)
                for event, entry in _placed(_threads(simulated, rank, events))
            ],
        }


def _by_rank(simulated: Simulated[Any]) -> list[list[Event]]:
    events: list[list[Event]] = [[] for _ in simulated.results]
    for event in simulated.trace.events:
        events[event.rank].append(event)
    return events


def _threads(simulated: Simulated[Any], rank: int, events: Iterable[Event]) -> list[Thread]:
    """Assign each event of a rank to a thread, so that no two overlap."""
    device: list[Event] = []
    network: list[Event] = []
    streams: dict[str, list[Event]] = {}
    for track, event in simulated.gpu_time.tracks if simulated.gpu_time else ():
        if event.rank == rank:
            streams.setdefault(track, []).append(event)
    on_streams = {event for events in streams.values() for event in events}
    for event in events:
        if event not in on_streams:
            (device if event.kind in ("compute", "wait") else network).append(event)
    return [
        (HOST if simulated.gpu_time else "compute", device),
        *((name, lane) for name, stream in streams.items() for lane in lanes(stream)),
        *((f"communication {number}", lane) for number, lane in enumerate(lanes(network), 1)),
    ]


def _placed(threads: Iterable[Thread]) -> list[Placed]:
    return [
        (event, _slice(event, thread, name))
        for thread, (name, lane) in enumerate(threads, COMPUTE)
        for event in lane
    ]


def _slice(event: Event, thread: int, of: str) -> Json:
    """Return an event as a complete event ("X") in the trace format."""
    start_us, end_us = _us(event.start_s), _us(event.end_s)
    return {
        "ph": "X",
        "cat": "wait" if event.kind == "wait" else "cpu_op" if of == HOST else "kernel",
        "name": f"wait: {event.name}" if event.kind == "wait" else event.name or of,
        "pid": event.rank,
        "tid": thread,
        "ts": start_us,
        "dur": round(end_us - start_us, WRITTEN_DIGITS),
        "args": _arguments(event, -1 if of == HOST else thread),
    }


def _arguments(event: Event, thread: int) -> Json:
    arguments: Json = {"stream": thread}
    if event.kind in ("send", "recv", "collective"):
        arguments["bytes"] = event.num_bytes
    if event.peer >= 0:
        arguments["peer"] = event.peer
    file, line, function = event.site
    if file:
        arguments["source"] = f"{file}:{line} in {function}"
    return arguments


def _names(simulated: Simulated[Any], threads: Iterable[list[Thread]]) -> Iterator[Json]:
    """Yield entries that set the names and the order of processes and threads in the viewer."""
    cluster = simulated.cluster
    for rank in range(len(simulated.results)):
        node = f", node {cluster.node_of(rank)}" if cluster.nodes > 1 else ""
        yield _name("process_name", rank, COMPUTE, name=f"rank {rank}{node}")
        yield _name("process_sort_index", rank, COMPUTE, sort_index=rank)
    for rank, of_rank in enumerate(threads):
        for thread, (name, lane) in enumerate(of_rank, COMPUTE):
            if lane:
                yield _name("thread_name", rank, thread, name=name)
                yield _name("thread_sort_index", rank, thread, sort_index=thread)


def _name(kind: str, rank: int, thread: int, **arguments: object) -> Json:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": arguments}


def _arrows(simulated: Simulated[Any], placed: Iterable[Placed]) -> Iterator[Json]:
    """Yield both ends ("s" and "f") of each message's arrow, each inside its event's slice."""
    threads = {
        (event.kind, event.message): {"pid": entry["pid"], "tid": entry["tid"]}
        for event, entry in placed
    }
    for send, recv in simulated.trace.pairs():
        arrow = {"cat": "message", "name": "message", "id": send.message}
        leaves_us = _us(departure_s(send, recv))
        arrives_us = max(_us(recv.start_s), round(_us(recv.end_s) - 1e-3, WRITTEN_DIGITS))
        sender, receiver = threads["send", send.message], threads["recv", send.message]
        yield {"ph": "s", **arrow, **sender, "ts": leaves_us}
        yield {"ph": "f", "bp": "e", **arrow, **receiver, "ts": arrives_us}


def _as_kernel(event: Event, entry: Json) -> Json:
    """Give a communication slice the name of an NCCL kernel, and mark a wait as a host call."""
    if entry["cat"] == "wait":
        return {**entry, "cat": "cpu_op", "args": {**entry["args"], "stream": -1}}
    if event.kind == "compute":
        return entry
    words = "send_recv" if entry["name"] in ("send", "recv") else entry["name"]
    kind = "".join(word.capitalize() for word in words.split("_"))
    return {**entry, "name": f"ncclDevKernel_{kind}"}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, WRITTEN_DIGITS)
