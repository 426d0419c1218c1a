"""One rank's host and GPUs: a context in which operations run on the GPU that holds their tensors.

    x = torch.randn(4096, 4096, device="cuda")
    y = x @ x          the host launches it (5 µs); the stream takes 172 µs on an H100
    y.sum().item()     the host waits until the stream is done

The rank's clock is the host's. Values are computed at once, in the order of the program. Only where
an operation uses a tensor that communication still changes, the thread waits for the bytes, while
the host's clock stays where it is.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import Parameter

from distlab.sim.device import meta_cache
from distlab.sim.device.device import Device
from distlab.sim.device.flops import Cost, Operation, op_cost
from distlab.sim.engine.clock import Clock
from distlab.sim.gpu import syncs
from distlab.sim.gpu.accesses import Access, Flight, Span, stored
from distlab.sim.gpu.adoption import made_for_gpu
from distlab.sim.gpu.hazards import Grave, Hazards, in_one_batch
from distlab.sim.gpu.host import Host
from distlab.sim.gpu.mixtures import attribute_on_host, mixture_error
from distlab.sim.gpu.placement import Home, home_of, host_home, index_of, pin, put_on, renew
from distlab.sim.gpu.streams import Communication, Mark, Moment, Stream
from distlab.sim.gpu.usage import Work
from distlab.sim.hardware.cluster import GPU
from distlab.sim.hardware.costs import Costs
from distlab.sim.reporting.sites import Places, Site

CPU = torch.device("cpu")
_MIXED = syncs.COPIES | {
    *("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "set_"),
    *("_foreach_copy_", "_has_compatible_shallow_copy_type"),
}
_PLACERS = frozenset({"copy_", "_pin_memory"})  # they move tensors without an argument "device"
_SEQUENCES = (list, tuple)
_thread = threading.local()


def this_device() -> "HostAndGpus | None":
    """Return the device of the calling thread's rank; None outside a rank."""
    device: HostAndGpus | None = getattr(_thread, "device", None)
    return device


def rank_device() -> "HostAndGpus":
    """Return the device of the calling thread's rank.

    Raises:
        RuntimeError: The thread belongs to no rank.
    """
    device = this_device()
    if device is None:
        raise RuntimeError(
            "only the threads of a simulated rank have GPUs: put what uses one into the function "
            "that the ranks run"
        )
    return device


def await_values(tensors: Iterable[Tensor | None]) -> None:
    """Wait for communication that fills tensors, as an operation on them would.

    The simulator has to, before it looks at the values of GPUs: a stream that waits for a
    collective holds back neither the host nor the simulator.
    """
    if device := this_device():
        of_rank = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)  # a DTensor's
        device.await_flights([Use(x, home_of(x), False) for x in of_rank if x is not None])


class Use(NamedTuple):
    """A tensor that an operation uses, and the home of its storage."""

    tensor: Tensor
    home: Home | None
    is_write: bool


class Placing(NamedTuple):
    """The places of an operation's tensors, as numbers of GPUs; -1 stands for the host.

    Attributes:
        source: Place of the arguments.
        target: Place of new results.
    """

    source: int
    target: int
    kwargs: dict[str, Any]
    pins: bool


class HostAndGpus(Device, Host):  # type: ignore[no-untyped-call]
    """The host of one rank, and the GPUs of its node.

    Args:
        gpu: Kind of the GPUs.
        clock: Clock of the simulated world; the running rank's time is the host's.
        places: Call sites of the program.
        local: Number of the GPU that the rank should use, as in LOCAL_RANK.
        num_gpus: Number of GPUs of its node.
        costs: Times of the host.
        has_tracks: True to remember the work of every stream, for pictures and traces.

    Attributes:
        kind: Kind of the GPUs.
        hazards: Wrong uses of memory.
    """

    def __init__(
        self,
        gpu: GPU,
        *,
        clock: Clock,
        places: Places,
        local: int,
        num_gpus: int,
        costs: Costs,
        has_tracks: bool = False,
        capacity_bytes: int | None = None,
        slowdown: float = 1.0,
    ) -> None:
        super().__init__(
            gpu,
            advance=lambda seconds, _: clock.advance(seconds),
            capacity_bytes=capacity_bytes,
            slowdown=slowdown,
        )
        self.kind = gpu
        Host.__init__(self, clock, places, num_gpus, costs, has_tracks=has_tracks)
        self._local_rank = local
        self.hazards = Hazards(self.streams, clock.scheduler.is_ending)
        self._grave = Grave(self.hazards.add)
        self.memory.on_resize = self._resized

    # Threads

    def __enter__(self) -> "HostAndGpus":
        _thread.device = self
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _thread.device = None

    @contextlib.contextmanager
    def in_another_thread(self) -> Iterator[None]:
        """Run the calling thread's operations here too; the device must already be entered."""
        _thread.device = self
        try:
            with super().in_another_thread():
                yield
        finally:
            _thread.device = None

    @property
    def is_paused(self) -> bool:
        """True while the simulator's own code reads tensors."""
        return self._is_paused

    # Operations

    def _run(
        self,
        func: OpOverload[..., Any],
        op: Operation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._is_paused:
            return func(*args, **kwargs)
        if op.is_view:  # it shares the storage, and so its place
            out = func(*args, **kwargs)
            if index_of(args[0]) >= 0:
                self.memory.observe(op, args, out)
            return out
        uses = _uses(op, args, kwargs)
        placing = self._place(op, uses, args, kwargs)
        if placing.source >= 0 or placing.target >= 0:
            out = self._run_on_gpu(func, op, uses, args, placing)
        else:
            self._use_on_host(op, uses)
            if not self.usage.num_kernels:
                self._note_first_on_host(op, args)
            out, _ = meta_cache.run(func, op, args, placing.kwargs)
        if placing.pins:
            pin(out)
        return out

    def _run_parts(
        self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self.beside(args, kwargs):
            return super()._run_parts(func, args, kwargs)

    @contextlib.contextmanager
    def beside(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Put what torch's C++ code makes in this block on the GPU of an operation's arguments."""
        tensors = (tensor for value in (*args, *kwargs.values()) for tensor in _among(value))
        place = max(map(index_of, tensors), default=-1)
        with self.running_on(place if place >= 0 else self.running):
            yield

    def _place(
        self, op: Operation, uses: Sequence[Use], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Placing:
        source, has_host = -1, False
        for tensor, home, _ in uses:
            index = -1 if home is None else home.index
            if index >= 0:
                if source not in (-1, index) and op.name not in _MIXED:
                    raise self._on_two(op, uses, source, index)
                source = max(source, index)
            elif tensor.dim() and not tensor.is_meta:
                has_host = True
        if source >= 0 and has_host and op.name not in _MIXED:
            raise self._on_two(op, uses, source, -1)
        return self._placing(op, source, args, kwargs)

    def _on_two(self, op: Operation, uses: Sequence[Use], *indices: int) -> RuntimeError:
        homes = {index: next(_homes_on(index, uses), None) for index in indices}
        visible = self.visible()
        own = visible.index(self._local_rank) if self._local_rank in visible else -1
        of_host = (x for x, home, _ in uses if x.dim() and (home is None or home.index < 0))
        texts = filter(None, map(attribute_on_host, of_host)) if -1 in indices else iter(())
        return mixture_error(op.name, homes, own, self.clock.current.number, next(texts, ""))

    def _placing(
        self, op: Operation, source: int, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Placing:
        if not kwargs and op.name not in _PLACERS:
            return Placing(source, source, kwargs, False)
        device = kwargs.get("device")
        pins = op.name == "_pin_memory" or bool(kwargs.get("pin_memory"))
        if pins or device is not None:
            kwargs = {**kwargs}
            if kwargs.pop("pin_memory", None) is not None:
                kwargs["pin_memory"] = False
        if op.name == "copy_":
            return Placing(source, index_of(args[0]), kwargs, pins)
        if device is None or pins:
            return Placing(source, -1 if pins else source, kwargs, pins)
        if device.type == "cuda":
            kwargs["device"] = CPU
            target = self.index if device.index is None else device.index
            self.is_used = True
        elif device.type == "cpu" and op.creates:
            target = self._place_by_torch(op, source)
        else:
            target = -1
        return Placing(source, target, kwargs, pins)

    def _place_by_torch(self, op: Operation, source: int) -> int:
        """Return where C++ code wants a new tensor, as it takes those of GPUs for the CPU's."""
        if op.name == "_to_copy" and source >= 0:  # a cast, unless the program moves a tensor
            return -1 if self.is_moving else source
        return self.running if self.running >= 0 else made_for_gpu(source)

    def _run_on_gpu(
        self,
        func: OpOverload[..., Any],
        op: Operation,
        uses: list[Use],
        args: tuple[Any, ...],
        placing: Placing,
    ) -> Any:
        is_reading = op.name == "_local_scalar_dense"
        uses = [] if op.is_factory else uses  # it reads no more than a shape
        if is_reading or not op.is_free:
            self.await_flights(uses)
        index = max(placing.source, placing.target)
        before, self._local.running = self.running, index
        try:
            out, cost = meta_cache.run(func, op, args, placing.kwargs)
        except RuntimeError as error:
            self.memory.refuse(error, op.name)
            raise
        finally:
            self._local.running = before
        created = _tensors_of(out) if op.creates and not op.is_view else []
        if placing.target >= 0:
            self._put(created, placing.target)
            self.memory.observe(op, args, out)
        if is_reading or not op.is_free:
            self._launch_operation(op, uses, args, placing, out, created, cost)
        return out

    def _launch_operation(
        self,
        op: Operation,
        uses: list[Use],
        args: Sequence[Any],
        placing: Placing,
        out: Any,
        created: list[Tensor],
        cost: Cost | None,
    ) -> None:
        """Put an operation that has run on the current stream, and wait for it if torch does."""
        index, copy = max(placing.source, placing.target), None
        if op.name in syncs.COPIES:
            copy = syncs.copy_of(op.name, args, placing.kwargs, out, placing.target)
        site = self.places.line()
        seconds = self._duration(op, args, placing.kwargs, out, cost, copy)
        if copy is not None:
            index = copy.gpu
            self._meet(copy)
        stream = self.working_stream(index)
        self.launch(stream, seconds, op.name, site)
        if copy and not copy.waits:
            uses, created = [Use(copy.source, host_home(copy.source), False)], [copy.target]
            host_home(copy.target)
        uses += [_made(tensor, site) for tensor in created]
        self._use(op, uses, stream, site, with_host=copy is not None)
        if copy:
            self._meet(copy)
        waits = copy.waits if copy else syncs.reason(op.name, args, placing.kwargs)
        if waits:
            self.sync(f"{waits}{self._inside()}", [stream], site)

    def _meet(self, copy: syncs.Copy) -> None:
        """Make the streams of both GPUs of a copy wait for each other, as torch does."""
        places = {index_of(copy.source), index_of(copy.target)}
        if min(places) >= 0:
            streams = [self.current_stream(index) for index in places]
            for mark in [Mark.of(stream, self.host_s()) for stream in streams]:
                mark.hold(streams)

    def _inside(self) -> str:
        """Return which part of torch runs the operation, as text; "" if the program does."""
        maker = self.places.call_site()[2].partition(".")[0]
        return f", in {maker}" if maker not in ("", OpOverload.__name__) else ""

    def _put(self, created: Sequence[Tensor], index: int) -> None:
        """Note that results with new memory are on a GPU."""
        if not created:
            return
        stream = self.working_stream(index)
        for tensor in created:
            if index_of(tensor) < 0 and not tensor.is_meta:
                self.adopt(tensor, stream)
        if not self._grave.is_empty:
            num_bytes = sum(stored(tensor).untyped_storage().nbytes() for tensor in created)
            self._grave.reuse(stream, num_bytes, self.places.line())

    def adopt(self, tensor: Tensor, stream: Stream | None = None) -> None:
        """Note that a tensor is on the GPU of a stream; None stands for the current one."""
        stream = stream or self.current_stream()
        home = put_on(tensor, stream.index)
        if home is not None:
            self._allocate(home, stream, stored(tensor).untyped_storage().nbytes())

    def _allocate(self, home: Home, stream: Stream, num_bytes: int) -> None:
        home.stream, home.grave, home.num_bytes = stream, self._grave, num_bytes
        if num_bytes and stream.index not in self.usage.placed:
            self.usage.placed[stream.index] = self.places.call_site()

    def _resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Note that a storage gets new memory; FSDP frees and restores parameters so.

        Communication that has yet to use the old memory comes first, as it does on a stream.
        """
        for flight in getattr(getattr(storage, "_home", None), "flights", ()):
            self._await(flight.operation)
        home = renew(storage) if num_bytes else None
        if home is not None:
            self._allocate(home, self.current_stream(home.index), num_bytes)

    def _duration(
        self,
        op: Operation,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        cost: Cost | None,
        copy: syncs.Copy | None,
    ) -> float:
        """Return how long the GPU takes, in seconds."""
        if copy is not None:
            seconds: float = out.nbytes / self.costs.copy_bytes_per_s
        else:
            seconds = self._seconds(self.kind, cost or op_cost(op, args, kwargs, out))
        return max(seconds, self.costs.shortest_kernel_s) * self.slowdown

    # Communication

    def launch_communication(
        self,
        channel: Stream,
        pendings: Sequence[Communication],
        tensors: Sequence[tuple[Tensor, bool]],
        text: str,
        site: Site,
    ) -> tuple[Moment, Mark]:
        """Put communication on a communicator's stream, behind the work of the current one.

        Args:
            channel: The communicator's stream.
            tensors: Tensors of this rank, each with True if it is written.

        Returns:
            When the channel gets to it, and its end, for which streams can wait.
        """
        host_s, current = self.host_s(), self.working_stream(channel.index)
        channel.comes_after(current.reached)
        channel.waited = current.waited if current.waits_for_itself else None
        start = channel.moment
        start.join(current.moment)
        start.known_s = max(start.known_s, host_s)
        number = channel.next_number()
        if self.usage.has_tracks:
            self.usage.tracks.append(Work(channel, text, site, start.copy(), parts=pendings))
        channel.moment = Moment(0.0, dict.fromkeys(pendings, 0.0))
        end = Mark(channel.moment.copy(), {**channel.reached}, channel.index)
        for tensor, is_write in tensors:
            home, span = home_of(tensor), Span.of(tensor)
            if home is None:
                continue
            self.hazards.use(home, Access(channel, number, span, is_write, text, site))
            home.flights = [flight for flight in home.flights if not flight.operation.is_done]
            home.flights += [Flight(p, span, is_write, channel, number) for p in pendings]
        return start, end

    def compare_batch(
        self, names: Sequence[str], tensors: Sequence[tuple[Tensor, bool]], site: Site
    ) -> None:
        """Look for messages of one batch that use the same memory, since they run together."""
        by_home: dict[Home, list[tuple[str, Span, bool]]] = {}
        for name, (tensor, is_write) in zip(names, tensors, strict=True):
            if home := home_of(tensor):
                by_home.setdefault(home, []).append((name, Span.of(tensor), is_write))
        for uses in by_home.values():
            for one, other in combinations(uses, 2):
                if (one[2] or other[2]) and one[1].meets(other[1]):
                    self.hazards.add(in_one_batch(one[0], other[0], site))

    # Order

    def await_flights(self, uses: Sequence[Use]) -> None:
        """Wait for the bytes of communication that was ordered before an operation."""
        for tensor, home, is_write in uses:
            if home is not None and home.flights:
                self.await_bytes(home, Span.of(tensor), is_write, self._stream_of(home))

    def _stream_of(self, home: Home) -> Stream:
        return self.working_stream(home.index) if home.index >= 0 else self.host

    def await_bytes(self, home: Home, span: Span, is_write: bool, stream: Stream) -> None:
        """Wait until communication has let go of some bytes, if ``stream`` comes after it."""
        home.flights = [flight for flight in home.flights if not flight.operation.is_done]
        for flight in home.flights:
            concerns = (is_write or flight.is_write) and span.may_meet(flight.span)
            if concerns and stream.has_reached(flight.stream, flight.number):
                with self._saying("waits to write" if is_write else "waits for values"):
                    self._await(flight.operation)

    def _use(
        self,
        op: Operation,
        uses: Sequence[Use],
        stream: Stream,
        site: Site,
        *,
        with_host: bool,
    ) -> None:
        """Note the operation's accesses, and look for those that nothing orders.

        Args:
            with_host: True if the stream also uses memory of the host.
        """
        for tensor, home, is_write in uses:
            if home is not None and (with_host or home.index >= 0):
                self.use(tensor, home, stream, op.name, site, is_write=is_write)

    def use(
        self, tensor: Tensor, home: Home, stream: Stream, text: str, site: Site, *, is_write: bool
    ) -> None:
        """Note that the latest work of a stream reads or writes a tensor."""
        access = Access(stream, stream.reached[stream], Span.of(tensor), is_write, text, site)
        self.hazards.use(home, access)

    def _use_on_host(self, op: Operation, uses: Sequence[Use]) -> None:
        """Look for a host's use of memory that a GPU still copies."""
        if op.is_free and op.name != "_local_scalar_dense":
            return
        for tensor, home, is_write in uses:
            if home is not None and (home.accesses or home.flights):
                self.host_uses(tensor, home, op.name, is_write=is_write)

    def _note_first_on_host(self, op: Operation, args: Sequence[Any]) -> None:
        """Remember where the host computes, in case no GPU is ever used."""
        usage = self.usage
        if usage.first_parameter is None and any(isinstance(a, Parameter) for a in args):
            usage.first_parameter = self.places.line()
        if usage.first_product is None and op.flops is not None:
            on = next((a.device.type for a in args if isinstance(a, Tensor)), "cpu")
            usage.first_product = op.name, on, self.places.line()

    def host_uses(self, tensor: Tensor, home: Home, text: str, *, is_write: bool) -> None:
        """Note that the host reads or writes a tensor."""
        span = Span.of(tensor)
        self.await_bytes(home, span, is_write, self.host)
        number = self.host.next_number()
        access = Access(self.host, number, span, is_write, text, self.places.line())
        self.hazards.use(home, access)
        for stream in self.streams:  # the host launches later work only after this
            stream.comes_after({self.host: number})


def _homes_on(index: int, uses: Sequence[Use]) -> Iterator[Home]:
    return (use.home for use in uses if use.home is not None and use.home.index == index)


def _made(tensor: Tensor, site: Site) -> Use:
    """Note the line that made a tensor, and return that use of it."""
    home = home_of(tensor)
    if home is not None:
        home.made = home.made or site
    return Use(tensor, home, True)


def _uses(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Use]:
    uses: list[Use] = []
    written = op.written
    for position, value in enumerate(args):
        if isinstance(value, Tensor):
            uses.append(Use(value, home_of(value), position in written))
        elif type(value) in _SEQUENCES:
            uses += [Use(tensor, home_of(tensor), position in written) for tensor in _among(value)]
    for name, value in kwargs.items():
        uses += [Use(tensor, home_of(tensor), name in op.out_names) for tensor in _among(value)]
    return uses


def _among(value: Any) -> list[Tensor]:
    values = value if type(value) in _SEQUENCES else (value,)
    return [part for part in values if isinstance(part, Tensor)]


def _tensors_of(out: Any) -> list[Tensor]:
    """Return the tensors of a result, sparse ones, too."""
    values = out if isinstance(out, _SEQUENCES) else (out,)
    return [value for value in values if isinstance(value, Tensor)]
