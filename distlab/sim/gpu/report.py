"""Where the time of a world's hosts and GPUs went, the work of their streams, and what is wrong."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

from distlab.sim.engine.trace import Event
from distlab.sim.gpu.device import HostAndGpus
from distlab.sim.gpu.strays import strays
from distlab.sim.gpu.streams import Stream
from distlab.sim.gpu.usage import Usage, Work
from distlab.sim.reporting.report import place
from distlab.sim.results.gpu_time import GpuTime, HostWait, OnTrack, RankTime, merged


def gpu_time(devices: Sequence[HostAndGpus], wrong: Sequence[str]) -> GpuTime:
    """Return times and tracks of all ranks.

    Args:
        devices: Host and GPUs of each rank.
        wrong: Lines on wrong uses.
    """
    ranks, waits = [], []
    for rank, device in enumerate(devices):
        usage = device.usage
        ranks.append(_times(usage))
        waits += [HostWait(rank, *key, *astuple(sync)) for key, sync in usage.syncs.items()]
    return GpuTime(ranks, waits, [*wrong], tracks(devices))


def wrong(
    devices: Sequence[HostAndGpus], nodes: Sequence[int], *, has_ended: bool
) -> Iterator[str]:
    """Yield a line for each wrong use of memory, and of GPUs: none at all, or another rank's.

    Args:
        nodes: Node of each rank.
        has_ended: True if the world has ended without an error, so nothing more is to come.
    """
    lines: list[tuple[int, str, int]] = []
    for rank, device in enumerate(devices):
        lines += [(rank, line, 1) for line in _unused(device.usage) if has_ended]
        lines += [(rank, hazard.line(), count) for hazard, count in device.hazards]
    if has_ended:
        lines += [(rank, line, 1) for rank, line in strays(devices, nodes)]
    return merged(iter(lines))


def _times(usage: Usage) -> RankTime:
    return RankTime(usage.busy_s, usage.exposed_s, usage.late_s, usage.waits_s, usage.num_kernels)


def _unused(usage: Usage) -> Iterator[str]:
    """Yield a line if the rank has computed, but never on a GPU."""
    if usage.num_kernels or usage.first_product is None:
        return
    name, device, site = usage.first_product
    yield (
        f"{place(usage.first_parameter or site)}: what is made here is on the device {device}, and "
        f"no GPU computes (first {name}: {place(site)}): move the model and the data to "
        "cuda:LOCAL_RANK"
    )


def tracks(devices: Sequence[HostAndGpus]) -> list[OnTrack]:
    """Return the work of all streams, as far as it was done."""
    return [track for rank, device in enumerate(devices) for track in _tracks(rank, device)]


def _tracks(rank: int, device: HostAndGpus) -> Iterator[OnTrack]:
    names = _names(device.streams)
    for work in device.usage.tracks:
        for event in _events(rank, work):
            yield OnTrack(names[work.stream], event)


def _names(streams: Sequence[Stream]) -> dict[Stream, str]:
    """Return a name for each stream, such as "cuda:0 default stream" or "cuda:0 NCCL 2"."""
    names, counts = {}, Counter[str]()
    for stream in streams:
        kind = stream.name.removeprefix("the ").removesuffix("'s stream")
        name = f"cuda:{stream.index} {kind}"
        counts[name] += 1
        names[stream] = name if counts[name] == 1 else f"{name} {counts[name]}"
    return names


def _events(rank: int, work: Work) -> Iterator[Event]:
    parts: Sequence[Any] = work.parts
    for part in parts:
        if part.is_done and part.error is None:
            of_part = part.kind, part.name, part.posted_s, part.done_s, part.num_bytes, part.peer
            yield Event(rank, *of_part, part.site, part.number)
    work.start.fold()
    if not (parts or work.start.after):
        start_s = work.start.known_s
        yield Event(rank, "compute", work.name, start_s, start_s + work.seconds, site=work.site)
