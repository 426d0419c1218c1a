"""Trace files have every event in its place, and an arrow for every message."""

import re
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pictured import compute, overlapped, ring, run

from distlab.sim import Simulated
from distlab.sim.results.exports import (
    chrome_trace,
    kineto_traces,
)

NANOSECOND = 1.001e-3  # in microseconds; times in files are rounded to nanoseconds
Json = dict[str, Any]


def buffered() -> None:
    """Send messages that complete on rank 0 before rank 1 posts its receives."""
    if dist.get_rank() == 0:
        for _ in range(3):
            dist.send(torch.ones(100), 1)
    else:
        compute(20)
        for _ in range(3):
            dist.recv(torch.ones(100), 0)


def out_of_order() -> None:
    """Send messages of 1, 2 and 3 elements; the last one sent is the first one received."""
    if dist.get_rank() == 0:
        works = [dist.isend(torch.ones(n), 1, tag=n) for n in (1, 2, 3)]
    else:
        works = [dist.irecv(torch.ones(n), 0, tag=n) for n in (3, 2, 1)]
    for work in works:
        work.wait()


PROGRAMS = {
    "ring": (ring, {}),
    "overlapped": (overlapped, {}),
    "buffered": (buffered, {"eager_bytes": 1000}),
    "out_of_order": (out_of_order, {}),
}


@pytest.fixture(scope="module", params=list(PROGRAMS))
def simulated(request: pytest.FixtureRequest) -> Simulated[Any]:
    fn, options = PROGRAMS[request.param]
    return run(fn, 4 if request.param in ("ring", "overlapped") else 2, **options)


def slices(simulated: Simulated[Any]) -> list[Json]:
    return [event for event in chrome_trace(simulated)["traceEvents"] if event["ph"] == "X"]


def arrows(simulated: Simulated[Any]) -> list[tuple[Json, Json]]:
    """Return the events at which each arrow starts and ends."""
    ends: dict[int, dict[str, Json]] = defaultdict(dict)
    for event in chrome_trace(simulated)["traceEvents"]:
        if event["ph"] in "sf":
            assert event["ph"] not in ends[event["id"]], "an end too many"
            ends[event["id"]][event["ph"]] = event
    return [(pair["s"], pair["f"]) for pair in ends.values()]


def around(end: Json, simulated: Simulated[Any]) -> list[Json]:
    """Return the slices that enclose one end of an arrow, on the same thread."""
    return [
        what
        for what in slices(simulated)
        if (what["pid"], what["tid"]) == (end["pid"], end["tid"])
        and what["ts"] <= end["ts"] <= what["ts"] + what["dur"]
    ]


def test_computation_and_waits_have_a_thread_of_their_own(simulated: Simulated[Any]) -> None:
    for rank in range(len(simulated.results)):
        mine = [what for what in slices(simulated) if what["pid"] == rank]
        computing = [what for what in mine if what["name"] == "compute"]
        waiting = [what for what in mine if what["name"].startswith("wait: ")]
        threads = {what["tid"] for what in computing + waiting}
        assert threads.isdisjoint(w["tid"] for w in mine if w not in computing + waiting)
        assert len(threads) <= 1
        for part, seconds in (
            (computing, simulated.trace.compute_s[rank]),
            (waiting, simulated.trace.exposed_s[rank]),
        ):
            assert sum(what["dur"] for what in part) == pytest.approx(
                seconds * 1e6, abs=NANOSECOND * (1 + len(part))
            )


def test_every_message_is_an_arrow_from_its_send_to_its_recv(simulated: Simulated[Any]) -> None:
    sends = [event for event in simulated.trace.events if event.kind == "send"]
    assert len(arrows(simulated)) == len(sends)
    for start, finish in arrows(simulated):
        assert start["ts"] <= finish["ts"]
        (send,) = [w for w in around(start, simulated) if w["name"] == "send"][-1:]
        (recv,) = [w for w in around(finish, simulated) if w["name"] == "recv"][:1]
        assert (send["args"]["peer"], recv["args"]["peer"]) == (recv["pid"], send["pid"])


def test_processes_and_threads_have_names_and_the_file_says_what_it_is() -> None:
    trace = chrome_trace(run(ring, 4, cluster="ethernet-10g"))
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {f"rank {rank}, node {rank}" for rank in range(4)}
    threads = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"compute", "communication 1", "communication 2"} == threads
    assert trace["otherData"]["label"] == "simulated, preset ethernet-10g, not measured"
    assert any("net_latency_s" in line for line in trace["otherData"]["assumed"])


def test_analysers_find_a_file_per_rank_with_kernels_they_know() -> None:
    simulated = run(overlapped, 4)
    traces = list(kineto_traces(simulated))
    assert [trace["distributedInfo"]["rank"] for trace in traces] == [0, 1, 2, 3]
    assert {trace["distributedInfo"]["world_size"] for trace in traces} == {4}
    for rank, trace in enumerate(traces):
        kernels = [what for what in trace["traceEvents"] if what["args"]["stream"] >= 0]
        communication = [what for what in kernels if re.match("nccl.*Kernel", what["name"])]
        assert {what["cat"] for what in kernels} == {"kernel"}
        assert [what["name"] for what in communication] == ["ncclDevKernel_AllReduce"] * 2
        computed_us = sum(w["dur"] for w in kernels if w not in communication)
        assert computed_us == pytest.approx(simulated.trace.compute_s[rank] * 1e6, abs=0.01)
