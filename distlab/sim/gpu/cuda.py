"""``torch.cuda`` as a rank with GPUs sees it: devices, streams, events, memory, random numbers.

Random numbers of GPUs come from the CPU's generator of the rank, so that a program draws the same
numbers on both.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any
from uuid import NAMESPACE_OID, uuid5

import torch
import torch.distributed as dist

from distlab.sim.engine.patience import POLL_S
from distlab.sim.gpu import allocator
from distlab.sim.gpu.device import rank_device, this_device
from distlab.sim.gpu.properties import Properties, chip_of, properties
from distlab.sim.gpu.streams import Mark, Stream, WaitedEvent
from distlab.sim.reporting.sites import Site
from distlab.util.replacing import Replace

_VERSION = "12.8"  # of CUDA


def index_from(device: Any) -> int:
    """Return the number of a GPU, given as a number, a name or a device; None: the current one."""
    if device is None or isinstance(device, int):
        return rank_device().index if device is None or device < 0 else device
    chosen = torch.device(device) if isinstance(device, str) else device
    if isinstance(chosen, CudaStream):
        return chosen.stream.index
    if chosen.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {chosen}")
    return rank_device().index if chosen.index is None else int(chosen.index)


class CudaStream:
    """``torch.cuda.Stream``.

    Attributes:
        stream: The simulated stream.
    """

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority
        self.stream = rank_device().new_stream("", index_from(device))
        self._before: list[tuple[Stream, Stream]] = []  # on its own GPU, and on the current one

    @classmethod
    def of(cls, stream: Stream) -> "CudaStream":
        """Return torch's view of a stream."""
        self = cls.__new__(cls)
        self.stream, self.priority, self._before = stream, 0, []
        return self

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.stream.index)

    @property
    def device_index(self) -> int:
        return self.stream.index

    device_type = 1  # the number of CUDA in torch's list of devices

    @property
    def stream_id(self) -> int:
        return id(self.stream)

    cuda_stream = stream_id

    def wait_stream(self, other: "CudaStream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or CudaEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _sync("Stream.synchronize()", [self.stream])

    def query(self) -> bool:
        """Return whether the stream is done at the host's time."""
        return _is_past(Mark.of(self.stream, 0.0))

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> "CudaStream":
        device = rank_device()
        self._before.append((device.current_stream(self.stream.index), device.current_stream()))
        device.set_stream(self.stream)
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._before.pop():
            rank_device().set_stream(stream)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and other.stream is self.stream

    def __hash__(self) -> int:
        return hash(self.stream)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream {self.stream.name} of cuda:{self.stream.index}>"


class Event:
    """``torch.Event``."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **_: Any) -> None:
        self.has_timing = enable_timing
        self.mark: Mark | None = None
        self._recorded: tuple[Stream, Site] | None = None

    def record(self, stream: CudaStream | None = None) -> None:
        device = rank_device()
        wanted = stream.stream if stream else device.current_stream()
        self.mark = Mark.of(wanted, device.host_s())
        self._recorded = wanted, device.places.call_site()[0]

    def wait(self, stream: CudaStream | None = None) -> None:
        device = rank_device()
        waiting = stream.stream if stream else device.current_stream()
        waiting.waited = WaitedEvent(self._recorded, device.places.call_site()[0])
        if self.mark is not None:
            self.mark.hold([waiting])

    def query(self) -> bool:
        return self.mark is None or _is_past(self.mark)

    def synchronize(self) -> None:
        """Make the host wait until the GPU gets to the event."""
        if self.mark is None:
            return
        device = rank_device()
        event = Stream("an event", device.index)
        event.moment, event.reached = self.mark.moment.copy(), {**self.mark.reached}
        device.host.waited = WaitedEvent(self._recorded, device.places.call_site()[0])
        _sync("Event.synchronize()", [event])

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds between two events."""
        if not (self.has_timing and end.has_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.mark is None or end.mark is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        device = rank_device()
        begin_s, end_s = (device.settled_s(event.moment) for event in (self.mark, end.mark))
        if end_s > device.host_s():
            raise RuntimeError(
                "CUDA error: device not ready: call end.synchronize() before elapsed_time()"
            )
        return (end_s - begin_s) * 1e3


class CudaEvent(Event):
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, *_: Any, **__: Any) -> None:
        super().__init__(enable_timing=enable_timing)


def _sync(reason: str, streams: list[Stream] | None) -> None:
    device = rank_device()
    device.sync(reason, streams, device.places.call_site()[0])


def _synchronize(device: Any = None) -> None:
    index = index_from(device)
    streams = [stream for stream in rank_device().streams if stream.index == index]
    _sync("torch.cuda.synchronize()", streams)


def _in_backward(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return autograd's engine, for which the rank's streams are prepared."""

    @wraps(run)
    def run_on_streams(*args: Any, **kwargs: Any) -> Any:
        device = this_device()
        with device.in_backward() if device else nullcontext():
            return run(*args, **kwargs)

    return run_on_streams


def _of_host(begin: Callable[..., None]) -> Callable[..., None]:
    """Return a profile's beginning that records the host, where all that is simulated runs.

    Without a GPU, torch's C++ code prints a page for each operation of a profile of CUDA.
    """

    @wraps(begin)
    def begin_on_host(*args: Any, use_cuda: bool = False, **settings: Any) -> None:
        begin(*args, **{**settings, "use_cpu": True, "use_device": None})

    return begin_on_host


def _is_past(mark: Mark) -> bool:
    device = rank_device()
    mark.moment.fold()
    under_way: list[Any] = [*mark.moment.after]
    if under_way:
        device.clock.poll(under_way[0].first)
    else:  # the host gets there by polling alone, however long that takes
        device.clock.advance(POLL_S)
        device.clock.act()
    mark.moment.fold()
    is_past = not mark.moment.after and mark.moment.known_s <= device.host_s()
    if is_past:
        device.learn(mark.reached)
    return is_past


class CurrentStream:
    """``torch.cuda.stream(s)``: a context in which a stream is the current one."""

    def __init__(self, stream: CudaStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> CudaStream | None:
        return self.stream.__enter__() if self.stream is not None else None

    def __exit__(self, *exception: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*exception)


class CurrentDevice:
    """``torch.cuda.device(i)``: a context in which a GPU is the current one."""

    def __init__(self, device: Any) -> None:
        self.idx, self.prev_idx = index_from(device), -1

    def __enter__(self) -> None:
        self.prev_idx = rank_device().index
        rank_device().choose(self.idx)

    def __exit__(self, *_: object) -> None:
        rank_device().choose(self.prev_idx)


def _properties(name: str, device: Any = None) -> Properties:
    host, index = rank_device(), index_from(device)
    host.begin_use(index)
    number = host.visible()[index]
    uuid = uuid5(NAMESPACE_OID, f"{socket.gethostname()} GPU {number}")
    memory_bytes = host.memory.capacity_bytes or 0
    return properties(name, memory_bytes, host.kind.memory_bytes_per_s, uuid, number)


def _sleep(cycles: int) -> None:
    host = rank_device()
    seconds = cycles / (chip_of(host.kind.name).clock_mhz * 1e6)
    stream = host.working_stream(host.index)
    host.launch(stream, seconds * host.slowdown, "_sleep", host.places.call_site()[0])


def _memory_stats() -> dict[str, int]:
    memory = rank_device().memory
    live, peak = memory.live_bytes, memory.peak_bytes
    stats: dict[str, int] = {}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats |= {f"{kind}.all.current": live, f"{kind}.all.peak": peak}
    return {**stats, "num_ooms": 0, "num_alloc_retries": 0}


def _memory_summary() -> str:
    return "\n".join(f"{name}: {value}" for name, value in _memory_stats().items())


def _free_and_total() -> tuple[int, int]:
    memory = rank_device().memory
    total = memory.capacity_bytes or 0
    return total - memory.live_bytes, total


def _set_device(device: Any) -> None:
    host, index = rank_device(), index_from(device)
    host.choose(index)
    host.chosen_at[index] = host.places.call_site()[0]


def _exchange_device(index: int) -> int:
    before = rank_device().index
    if index >= 0:
        rank_device().choose(index)
    return before


_SYNC_MODES = ("default", "warn", "error")


def _set_sync_debug_mode(mode: int | str) -> None:
    rank_device().sync_debug_mode = mode if isinstance(mode, int) else _SYNC_MODES.index(mode)


def _set_state(state: Any, _device: Any = None) -> None:
    torch.set_rng_state(state)


def _refuse_graphs(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "CUDA graphs are not simulated: launch the kernels one by one, and set their cost with "
        "--host-cost launch_s=…"
    )


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, because a simulated GPU has no such thing."""


def _succeed(*_: Any, **__: Any) -> int:
    return 0  # CUDA's code for success


def surface(name: str) -> Mapping[str, Any]:
    """Return the attributes of ``torch.cuda`` for ranks whose GPUs are called ``name``."""
    of_memory = {**_MEMORY, **allocator.SURFACE}
    return {**_DEVICES, **_STREAMS, **of_memory, **_RANDOM_NUMBERS, **_properties_of(name)}


_DEVICES: Mapping[str, Any] = {
    "_lazy_init": _nothing,
    "is_available": lambda: True,
    "is_initialized": lambda: rank_device().is_used,
    "init": _nothing,
    "device_count": lambda: rank_device().num_gpus,
    "current_device": lambda: rank_device().index,
    "set_device": _set_device,
    "_exchange_device": _exchange_device,
    "_maybe_exchange_device": _exchange_device,
    "device": CurrentDevice,
    "is_bf16_supported": lambda *_, **__: True,
    "_is_in_bad_fork": lambda: False,
    "ipc_collect": _nothing,
    "utilization": lambda device=None: 0,
    "can_device_access_peer": lambda device, peer: True,
}
_STREAMS: Mapping[str, Any] = {
    "synchronize": _synchronize,
    "current_stream": lambda d=None: CudaStream.of(rank_device().working_stream(index_from(d))),
    "default_stream": lambda d=None: CudaStream.of(rank_device().default_stream(index_from(d))),
    "set_stream": lambda stream: rank_device().set_stream(stream.stream),
    "stream": CurrentStream,
    "StreamContext": CurrentStream,
    "Stream": CudaStream,
    "Event": CudaEvent,
    "is_current_stream_capturing": lambda: False,
    "CUDAGraph": _refuse_graphs,
    "graph": _refuse_graphs,
    "make_graphed_callables": _refuse_graphs,
    "_sleep": _sleep,
    "set_sync_debug_mode": _set_sync_debug_mode,
    "get_sync_debug_mode": lambda: rank_device().sync_debug_mode,
}
_MEMORY: Mapping[str, Any] = {
    "empty_cache": _nothing,
    "memory_allocated": lambda device=None: rank_device().memory.live_bytes,
    "memory_reserved": lambda device=None: rank_device().memory.live_bytes,
    "max_memory_allocated": lambda device=None: rank_device().memory.peak_bytes,
    "max_memory_reserved": lambda device=None: rank_device().memory.peak_bytes,
    "reset_peak_memory_stats": lambda device=None: rank_device().memory.restart_peak(),
    "reset_accumulated_memory_stats": _nothing,
    "reset_max_memory_allocated": lambda device=None: rank_device().memory.restart_peak(),
    "memory_stats": lambda device=None: _memory_stats(),
    "memory_summary": lambda *_, **__: _memory_summary(),
    "mem_get_info": lambda device=None: _free_and_total(),
    "set_per_process_memory_fraction": _nothing,
}
_RANDOM_NUMBERS: Mapping[str, Any] = {
    "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
    "manual_seed_all": lambda seed: torch.default_generator.manual_seed(int(seed)),
    "seed": _nothing,
    "seed_all": _nothing,
    "initial_seed": torch.default_generator.initial_seed,
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "set_rng_state": _set_state,
    "get_rng_state_all": lambda: [torch.get_rng_state()] * rank_device().num_gpus,
    "set_rng_state_all": lambda states: torch.set_rng_state(states[rank_device().index]),
}


def _properties_of(name: str) -> Mapping[str, Any]:
    return {
        "get_device_name": lambda device=None: name,
        "get_device_capability": lambda device=None: chip_of(name).capability,
        "get_arch_list": lambda: ["sm_{}{}".format(*chip_of(name).capability)],
        "get_device_properties": partial(_properties, name),
    }


_CUDART = SimpleNamespace(
    cudaError=SimpleNamespace(success=0),
    cudaGetErrorString=str,
    cudaProfilerStart=_succeed,
    cudaProfilerStop=_succeed,
    cudaHostRegister=_succeed,
    cudaHostUnregister=_succeed,
    cudaMemGetInfo=lambda device=None: _free_and_total(),
)
_OF_ALLOCATORS = (
    *("empty_cache", "memory_stats", "memory_allocated", "memory_reserved"),
    *("max_memory_allocated", "max_memory_reserved"),
    *("reset_peak_memory_stats", "reset_accumulated_memory_stats"),
)


def _accelerator(cuda: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the attributes of ``torch.accelerator``."""
    return {
        **{name: cuda[name] for name in _OF_ALLOCATORS},
        "empty_host_cache": _nothing,
        "get_memory_info": cuda["mem_get_info"],
        "is_available": cuda["is_available"],
        "device_count": cuda["device_count"],
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": cuda["current_device"],
        "current_device_idx": cuda["current_device"],
        "set_device_index": cuda["set_device"],
        "set_device_idx": cuda["set_device"],
        "current_stream": cuda["current_stream"],
        "set_stream": cuda["set_stream"],
        "device_index": lambda index: CurrentDevice(index),
        "synchronize": cuda["synchronize"],
    }


def install(replace: Replace, of_ranks: Callable[[Any, str, Any], None], name: str) -> None:
    """Show the calling rank's GPUs as ``torch.cuda`` and ``torch.accelerator``.

    Args:
        replace: Function that replaces an attribute for all threads.
        of_ranks: Function that replaces a function for the threads of ranks.
        name: Name of the GPUs.
    """
    shown = surface(name)
    for owner in (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
        for attribute, value in shown.items():
            if hasattr(owner, attribute):
                (replace if isinstance(value, type) else of_ranks)(owner, attribute, value)
    for attribute, value in _accelerator(shown).items():
        if hasattr(torch.accelerator, attribute):
            of_ranks(torch.accelerator, attribute, value)
    of_ranks(torch._C, "_get_accelerator", lambda check=None: torch.device("cuda"))
    replace(torch.version, "cuda", _VERSION)
    replace(torch.cuda, "_cudart", _CUDART)
    profiling: Any = torch.autograd.profiler.profile
    replace(profiling, "__init__", _of_host(profiling.__init__))
    future: Any = torch.futures.Future
    replace(future, "__init__", _without_gpus(future.__init__))
    replace(torch, "Stream", CudaStream)
    replace(torch, "Event", Event)
    replace(torch.cuda, "default_generators", _generators())
    for attribute in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        of_ranks(torch.cuda.nvtx, attribute, _nothing)
    run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    replace(torch.autograd, "_engine_run_backward", _in_backward(run))
    of_ranks(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    for owner in (dist, dist.distributed_c10d):
        of_ranks(owner, "is_nccl_available", lambda: True)


def install_for_parent(replace: Replace, name: str, num_gpus: int) -> None:
    """Show the process that starts the ranks how many GPUs there are; it cannot use them.

    Args:
        name: Name of the GPUs.
    """
    counted = {"device_count": lambda: num_gpus, "_lazy_init": rank_device}
    shown = {**surface(name), **counted, "is_initialized": lambda: False}
    for attribute, value in shown.items():
        if hasattr(torch.cuda, attribute):
            replace(torch.cuda, attribute, value)
    for attribute, value in _accelerator(shown).items():
        if hasattr(torch.accelerator, attribute):
            replace(torch.accelerator, attribute, value)


def _without_gpus(init: Callable[..., None]) -> Callable[..., None]:
    """Return a future's ``__init__`` that takes GPUs; torch without CUDA refuses their names."""

    @wraps(init)
    def init_without(self: Any, *, devices: Sequence[Any] | None = None) -> None:
        others = [device for device in devices or () if torch.device(device).type != "cuda"]
        init(self, devices=others)

    return init_without


def _generators() -> tuple[torch.Generator, ...]:
    return (torch.default_generator,) * 8
