"""A rank's host, its GPUs and their streams: what runs where, and when the host waits.

host     ── launch ── launch ── sync · · · · ·           clock of the rank
stream        ── kernel ──── kernel ──┘                  Moment
"""

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from distlab.sim.engine.clock import Clock
from distlab.sim.engine.trace import NOWHERE
from distlab.sim.gpu.backward import Backward, Switches
from distlab.sim.gpu.streams import Mark, Moment, Reached, Stream
from distlab.sim.gpu.usage import Usage
from distlab.sim.hardware.costs import Costs
from distlab.sim.reporting.sites import Places, Site
from distlab.util.text import counted

VISIBLE = "CUDA_VISIBLE_DEVICES"
SYNC_TEXT = "called a synchronizing CUDA operation"


class Host:
    """The host of one rank, and the streams of the GPUs that it sees.

    Args:
        clock: Clock of the simulated world; the running rank's time is the host's.
        places: Call sites of the program.
        num_gpus: Number of GPUs of the rank's node.
        costs: Times of the host.
        has_tracks: True to remember the work of every stream, for pictures and traces.

    Attributes:
        usage: Times of the GPUs, and waits of the host.
        host: Order of the host with the streams.
        streams: All streams of the rank.
        is_used: True once the program has used a GPU.
        chosen_at: Line of the last ``torch.cuda.set_device`` of each GPU.
        chosen: Number of the GPU that the program has chosen last; empty if it never does.
        sync_debug_mode: 1 to warn, and 2 to raise, where the host waits.
    """

    def __init__(
        self, clock: Clock, places: Places, num_gpus: int, costs: Costs, *, has_tracks: bool
    ) -> None:
        self.clock, self.places, self.costs = clock, places, costs
        self._all_gpus = range(num_gpus)
        self._hidden_before = os.environ.get(VISIBLE, "")
        self._visible: Sequence[int] = ()  # known once the program has used a GPU
        self.usage = Usage(has_tracks=has_tracks)
        self.host = Stream("the host", -1)
        self.is_used = False
        self.chosen_at: dict[int, Site] = {}
        self.chosen: tuple[int, ...] = ()
        self.sync_debug_mode = 0
        self._defaults: dict[int, Stream] = {}
        self._sides: dict[int, Stream] = {}
        self.streams: list[Stream] = []
        self._num_made = 0  # streams that the program has made
        self._local = threading.local()  # each thread has its own GPU and streams

    # GPUs and streams

    def visible(self) -> Sequence[int]:
        """Return the numbers, on the node, of the GPUs that the program sees.

        They are all, unless the program sets CUDA_VISIBLE_DEVICES before it uses a GPU.
        """
        if self._visible:
            return self._visible
        text = os.environ.get(VISIBLE, "")
        if text == self._hidden_before:
            return self._all_gpus
        names = text.replace(" ", "").split(",")
        chosen = [int(name) for name in names if name.isdigit() and int(name) in self._all_gpus]
        return chosen or self._all_gpus

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the program sees."""
        return len(self.visible())

    @property
    def index(self) -> int:
        """Number of the thread's current GPU."""
        index: int = getattr(self._local, "index", 0)
        return index

    @property
    def running(self) -> int:
        """Number of the GPU on which the thread runs a function of torch's C++ code, or -1."""
        index: int = getattr(self._local, "running", -1)
        return index

    @property
    def is_moving(self) -> bool:
        """True while the thread moves a tensor between devices."""
        is_moving: bool = getattr(self._local, "is_moving", False)
        return is_moving

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Move a tensor between devices."""
        self._local.is_moving = True
        try:
            yield
        finally:
            self._local.is_moving = False

    @contextlib.contextmanager
    def running_on(self, index: int) -> Iterator[None]:
        """Run a function of torch's C++ code, which makes its tensors beside a GPU's."""
        before, self._local.running = self.running, index
        try:
            yield
        finally:
            self._local.running = before

    def choose(self, index: int) -> None:
        """Make a GPU the thread's current one.

        Raises:
            RuntimeError: The node has no such GPU; the text is CUDA's.
        """
        self.begin_use(index)
        self._local.index, self.is_used = index, True
        self.chosen = (index,)

    def begin_use(self, index: int) -> None:
        """Settle which GPUs the program sees, and raise unless ``index`` is one of them."""
        self._visible = self.visible()
        if not 0 <= index < self.num_gpus:
            numbers = f"cuda:0 to cuda:{self.num_gpus - 1}" if self.num_gpus > 1 else "cuda:0"
            raise RuntimeError(
                f"CUDA error: invalid device ordinal (rank {self.clock.current.number} asks for "
                f"cuda:{index}, and it sees {counted(self.num_gpus, 'GPU')}, {numbers})"
            )

    def new_stream(self, name: str, index: int) -> Stream:
        """Return a new stream of a GPU; it comes after what the host has waited for.

        Args:
            name: Name for reports; "" for a stream of the program, which gets a number.
        """
        self.begin_use(index)
        if not name:
            self._num_made += 1
            name = f"stream {self._num_made}"
        stream = Stream(name, index, self.host.reached)
        self.streams.append(stream)
        return stream

    def default_stream(self, index: int | None = None) -> Stream:
        """Return the stream that a GPU uses unless the program chooses another one."""
        index = self.index if index is None else index
        stream = self._defaults.get(index)
        if stream is None:
            stream = self._defaults[index] = self.new_stream("the default stream", index)
        return stream

    def current_stream(self, index: int | None = None) -> Stream:
        """Return the stream on which the thread puts its work on a GPU."""
        index = self.index if index is None else index
        chosen: dict[int, Stream] = getattr(self._local, "streams", {})
        return chosen.get(index) or self.default_stream(index)

    def side_stream(self, index: int) -> Stream:
        """Return the stream on which callbacks of futures run."""
        stream = self._sides.get(index)
        if stream is None:
            stream = self._sides[index] = self.new_stream("the stream of callbacks", index)
        return stream

    def set_stream(self, stream: Stream) -> None:
        """Make a stream, and its GPU, the thread's current ones."""
        chosen: dict[int, Stream] = getattr(self._local, "streams", {})
        self._local.streams, self._local.index = {**chosen, stream.index: stream}, stream.index
        self._local.switches = self._switches()
        self._local.switches.add(stream)

    def _switches(self) -> Switches:
        switches: Switches = getattr(self._local, "switches", None) or Switches()
        return switches

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Run a backward pass, in which ``working_stream`` depends on the node."""
        before = getattr(self._local, "backward", None)
        chosen: dict[int, Stream] = getattr(self._local, "streams", {})
        self._local.backward = Backward(chosen)
        try:
            yield
            self._local.backward.leave()
        finally:
            self._local.backward = before

    def working_stream(self, index: int) -> Stream:
        """Return the stream of a GPU for the thread's next work: in a backward pass, the node's."""
        current = self.current_stream(index)
        backward: Backward | None = getattr(self._local, "backward", None)
        node = torch._C._current_autograd_node() if backward else None
        if backward is None or node is None or not (switches := self._switches()):
            return current
        around = backward.outside.get(index) or self.default_stream(index)
        if current is not around:  # a hook has chosen another one
            return current
        number = node._sequence_nr()
        return backward.enter(
            number, switches.at(number, index) or self.default_stream(index), around
        )

    def host_s(self) -> float:
        """Return the host's time in virtual seconds."""
        return self.clock.scheduler.current.clock_s

    # Time

    def launch(self, stream: Stream, seconds: float, name: str, site: Site) -> None:
        """Put work on a stream, which costs the host some time."""
        self.clock.advance(self.costs.launch_s)
        host_s = self.host_s()
        is_default = stream is self._defaults.get(stream.index)
        exposed_s = stream.moment.fold()
        self.usage.launched(stream, host_s, seconds, name, site, exposed_s if is_default else 0.0)
        stream.moment.put(host_s, seconds)
        stream.next_number()

    def hold(self, mark: Mark) -> None:
        """Make the thread's stream of the mark's GPU wait for it."""
        mark.hold([self.working_stream(mark.index)])

    def learn(self, reached: Reached) -> None:
        """Note that the host knows how far streams have got, so all later work comes after it."""
        self.host.comes_after(reached)
        for stream in self.streams:
            stream.comes_after(self.host.reached)

    def sync(
        self, reason: str, streams: Sequence[Stream] | None = None, site: Site = NOWHERE
    ) -> None:
        """Make the host wait for streams; None for all of them.

        Args:
            reason: What waits, for the report; "" for the wait at the end of the program.
        """
        strand = self.clock.scheduler.current
        start_s = end_s = strand.clock_s
        doing = f"waits in {reason}" if reason else "waits at the end of its program"
        for stream in self.streams if streams is None else streams:
            before_s = stream.moment.known_s
            with self._saying(doing):
                end_s = max(end_s, self.settled_s(stream.moment))
            if stream is self._defaults.get(stream.index):
                self.usage.exposed_s += stream.moment.known_s - before_s
            self.host.comes_after(stream.reached)
        self.learn({})
        strand.clock_s = end_s
        if reason:
            self._complain(site)
            self.usage.waited(reason, site, end_s - start_s)
        if end_s > start_s:
            self.clock.waited(reason or "the end of the GPU's work", site, start_s)

    def _complain(self, site: Site) -> None:
        """Warn or raise, if ``torch.cuda.set_sync_debug_mode`` asks for it."""
        if self.sync_debug_mode == 1:
            warnings.warn_explicit(SYNC_TEXT, UserWarning, site[0] or "given code", site[1])
        elif self.sync_debug_mode == 2:
            raise RuntimeError(SYNC_TEXT)

    def settled_s(self, moment: Moment) -> float:
        """Return a moment's time; if it is not known, let other ranks run until it is."""
        moment.fold()
        while moment.after:
            self._await(next(iter(moment.after)))
            moment.fold()
        return moment.known_s

    def _await(self, operation: Any) -> None:
        """Let other ranks run until an operation is done; the host's time stays."""
        strand = self.clock.scheduler.current
        host_s = strand.clock_s
        while not operation.is_done:
            operation.first().block()
        strand.clock_s = host_s
        if operation.error is not None:
            raise operation.error

    @contextlib.contextmanager
    def _saying(self, doing: str) -> Iterator[None]:
        """Let reports say why the running thread waits."""
        strand = self.clock.scheduler.current
        strand.doing = doing
        try:
            yield
        finally:
            strand.doing = ""
