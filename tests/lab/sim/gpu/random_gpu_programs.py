"""Random programs with streams, whose works are in a right order, and what breaks without one.

    with on(2): g1[8:24].add_(g0[0:16]).remainder_(7); e3 = record()
    wait_event(0, e3)
    with on(0): w5 = dist.all_reduce(g1[8:16], async_op=True)

Each line is a work or an order. Works that come before others are kept as sets, much simpler than
the simulator's clocks, and with the same result.
"""

import contextlib
import random
from collections.abc import Mapping
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

STREAMS, PART, PARTS = 3, 8, 4  # number of streams, length of a part, parts of a buffer
BUFFERS = ("g0", "g1", "h0", "h1")  # those with g are on the GPU, those with h in pinned memory
HOST, CHANNEL = "host", "channel"
Queue = int | str  # number of a stream, or HOST or CHANNEL
Part = tuple[str, int]  # buffer, and number of a part of it
Line = int


class Slice(NamedTuple):
    buffer: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start * PART}:{self.stop * PART}]"

    def parts(self) -> set[Part]:
        return {(self.buffer, part) for part in range(self.start, self.stop)}


class Work(NamedTuple):
    """A line that uses memory.

    Attributes:
        queue: Stream on which it runs; for communication, the one on which it is called.
        kind: "kernel", "item" for one whose value the host awaits, "host", or for communication
            "async" or "in order".
    """

    text: str
    queue: Queue
    reads: set[Part]
    writes: set[Part]
    kind: str = "kernel"

    def is_communication(self) -> bool:
        return self.kind in ("async", "in order")

    def place(self) -> Queue:
        return CHANNEL if self.is_communication() else self.queue


class Order(NamedTuple):
    """A line that makes what comes later on a queue wait for the works of others, or for one."""

    text: str
    queue: Queue
    queues: tuple[Queue, ...] = ()
    work: Line = 0


Step = Work | Order


class History:
    """For each queue, the works that are certain to be done before its next one."""

    def __init__(self) -> None:
        self.works: dict[Line, Work] = {}
        self._known: dict[Queue, set[Line]] = {q: set() for q in (*range(STREAMS), HOST, CHANNEL)}
        self._ends: dict[Line, set[Line]] = {}

    def conflicts(self, work: Work) -> list[Line]:
        """Return the earlier works of the same bytes that a work does not come after."""
        known = self._known[work.queue] | self._known[work.place()]
        return [
            line
            for line, other in self.works.items()
            if line not in known
            and (work.writes & (other.reads | other.writes) or work.reads & other.writes)
        ]

    def add(self, line: Line, step: Step) -> None:
        known = self._known
        if isinstance(step, Order):
            known[step.queue].update(*(known[queue] for queue in step.queues))
            known[step.queue] |= self._ends.get(step.work, set())
        else:
            place = step.place()
            self.works[line] = step
            known[place] |= known[step.queue] | {line}
            self._ends[line] = {*known[place]}
            if step.kind == "in order":
                known[step.queue] |= known[place]
            if step.kind == "item":
                known[HOST] |= known[place]
        for later in known.values():  # the host launches it after what the host has waited for
            later |= known[HOST]


class RandomProgram:
    """A right program of 2 to 4 ranks.

    Attributes:
        steps: Its lines; the first has the number 1.
        reasons: For each order, the two works that it was added for.
    """

    def __init__(self, seed: int, num_works: int = 14) -> None:
        self._draw = random.Random(seed)
        self.file, self.num_ranks = f"program_{seed}.py", self._draw.randint(2, 4)
        self.steps: list[Step] = []
        self.reasons: dict[Line, tuple[Line, Line]] = {}
        self._history = History()
        makers = [self._kernel, self._copy, self._collective, self._gather, self._batch]
        makers += [self._on_host, self._item]
        for _ in range(num_works):
            self._add(self._draw.choice(makers)(self._draw.randrange(STREAMS)))

    def hazards_without(self, order: Line) -> set[tuple[Line, Line]]:
        """Return the pairs of works that nothing orders if one line is removed."""
        history, pairs = History(), set()
        for line, step in enumerate(self.steps, 1):
            if isinstance(step, Work):
                pairs |= {(earlier, line) for earlier in history.conflicts(step)}
            if line != order:
                history.add(line, step)
        return pairs

    def needed_orders(self) -> list[Line]:
        """Return the orders without which the works that they were added for are not ordered."""
        return [o for o, pair in self.reasons.items() if pair in self.hazards_without(o)]

    def code(self, *, on_gpu: bool, without: Line = 0) -> CodeType:
        lines = [
            "pass" if line == without or (isinstance(step, Order) and not on_gpu) else step.text
            for line, step in enumerate(self.steps, 1)
        ]
        return compile("\n".join(lines), self.file, "exec")

    # Works

    def _add(self, work: Work) -> None:
        orders = []
        while conflicts := self._history.conflicts(work):
            after = max(conflicts)  # the one that is remembered: it came after the others
            orders.append((len(self.steps) + 1, after))
            self._append(self._order(work.queue, after))
        self._append(work)
        self.reasons |= {order: (after, len(self.steps)) for order, after in orders}

    def _append(self, step: Step) -> None:
        text = step.text.replace("@", str(len(self.steps) + 1))  # names of a line's results
        self.steps.append(step._replace(text=text))
        self._history.add(len(self.steps), step)

    def _slices(self, names: str, num_parts: int, count: int) -> list[Slice]:
        """Return slices that do not overlap."""
        while True:
            chosen = []
            for _ in range(count):
                start = self._draw.randint(0, PARTS - num_parts)
                chosen.append(Slice(self._draw.choice(names.split()), start, start + num_parts))
            parts = [part for one in chosen for part in one.parts()]
            if len({*parts}) == len(parts):
                return chosen

    def _kernel(self, queue: int) -> Work:
        y, x = self._slices("g0 g1", self._draw.randint(1, 2), 2)
        text = f"with on({queue}): {y}.add_({x}).remainder_(7); e@ = record()"
        return Work(text, queue, x.parts(), y.parts())

    def _item(self, queue: int) -> Work:
        (x,) = self._slices("g0 g1", self._draw.randint(1, 4), 1)
        return Work(
            f"with on({queue}): total += {x}.sum().item(); e@ = record()",
            queue,
            x.parts(),
            set(),
            "item",
        )

    def _copy(self, queue: int) -> Work:
        num_parts = self._draw.randint(1, 3)
        (x,), (y,) = self._slices("g0 g1", num_parts, 1), self._slices("h0 h1", num_parts, 1)
        if self._draw.random() < 0.5:
            x, y = y, x
        text = f"with on({queue}): {y}.copy_({x}, non_blocking=True); e@ = record()"
        return Work(text, queue, x.parts(), y.parts())

    def _on_host(self, _: int) -> Work:
        (x,) = self._slices("h0 h1", self._draw.randint(1, 2), 1)
        if self._draw.random() < 0.5:
            return Work(f"total += {x}.sum().item()", HOST, x.parts(), set(), "host")
        return Work(f"{x}.add_(1).remainder_(7)", HOST, set(), x.parts(), "host")

    def _collective(self, queue: int) -> Work:
        (x,) = self._slices("g0 g1", self._draw.randint(1, 3), 1)
        call = self._draw.choice(
            ["all_reduce({}, ", f"broadcast({{}}, {self._draw.randrange(2)}, "]
        )
        return self._communication(f"dist.{call.format(x)}async_op={{}})", queue, set(), x.parts())

    def _gather(self, queue: int) -> Work:
        x, *ys = self._slices("g0 g1", 1, 1 + self.num_ranks)
        listed = ", ".join(map(str, ys))
        written = set().union(*(y.parts() for y in ys))
        text = f"dist.all_gather([{listed}], {x}, async_op={{}})"
        return self._communication(text, queue, x.parts(), written)

    def _communication(self, text: str, queue: int, reads: set[Part], writes: set[Part]) -> Work:
        is_async = self._draw.random() < 0.7
        text = f"with on({queue}): w@ = [{text.format('on_gpu' if is_async else False)}]"
        return Work(text, queue, reads, writes, "async" if is_async else "in order")

    def _batch(self, queue: int) -> Work:
        x, y = self._slices("g0 g1", self._draw.randint(1, 2), 2)
        ops = f"[dist.P2POp(dist.isend, {x}, right), dist.P2POp(dist.irecv, {y}, left)]"
        return Work(f"with on({queue}): w@ = batch({ops})", queue, x.parts(), y.parts(), "async")

    # Orders

    def _order(self, queue: Queue, after: Line) -> Order:
        work = self._history.works[after]
        everything: tuple[Queue, ...] = (*range(STREAMS), CHANNEL)
        ways = [Order("torch.cuda.synchronize()", HOST, everything)]
        if work.kind == "async":
            if queue != HOST:
                ways.append(Order(f"with on({queue}): wait(w{after})", queue, (), after))
            return ways[-1] if self._draw.random() < 0.8 else ways[0]
        ways.append(Order(f"streams[{work.queue}].synchronize()", HOST, (work.queue,)))
        if work.kind != "in order":
            ways.append(Order(f"e{after}.synchronize()", HOST, (), after))
        if queue != HOST:
            text = f"streams[{queue}].wait_stream(streams[{work.queue}])"
            ways.append(Order(text, queue, (work.queue,)))
            if work.kind != "in order":
                ways.append(Order(f"streams[{queue}].wait_event(e{after})", queue, (), after))
        return self._draw.choice(ways)


def run(codes: Mapping[str, CodeType], *, on_gpu: bool) -> dict[str, list[Any]]:
    """Run programs, one after another, on one rank; return the values of each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if on_gpu:
        torch.cuda.set_device(rank)
    return {name: _values(code, rank, size, on_gpu=on_gpu) for name, code in codes.items()}


def _values(code: CodeType, rank: int, size: int, *, on_gpu: bool) -> list[Any]:
    names: dict[str, Any] = _names_on_gpu() if on_gpu else _names_on_cpu()
    names |= {"torch": torch, "dist": dist, "on_gpu": on_gpu, "total": 0.0}
    names |= {"right": (rank + 1) % size, "left": (rank - 1) % size}
    for k, name in enumerate(BUFFERS):
        values = (torch.arange(PART * PARTS, dtype=torch.float64) * (k + 3) + rank) % 7
        is_pinned = on_gpu and name.startswith("h")
        names[name] = values.pin_memory() if is_pinned else values.to(names["device"](name))
    names["synchronize"]()
    exec(code, names)
    names["synchronize"]()
    return [names["total"], *(names[name].tolist() for name in BUFFERS)]


def _names_on_gpu() -> dict[str, Any]:
    default = torch.cuda.current_stream()
    streams = [default, *(torch.cuda.Stream() for _ in range(STREAMS - 1))]
    return {
        "device": lambda name: "cuda" if name.startswith("g") else "cpu",
        "synchronize": torch.cuda.synchronize,
        "streams": streams,
        "on": lambda number: torch.cuda.stream(streams[number]),
        "record": lambda: torch.cuda.current_stream().record_event(),
        "batch": dist.batch_isend_irecv,
        "wait": lambda works: [work.wait() for work in works],
    }


def _names_on_cpu() -> dict[str, Any]:
    return {
        "device": lambda name: "cpu",
        "synchronize": lambda: None,
        "on": lambda number: contextlib.nullcontext(),
        "record": lambda: None,
        "batch": lambda ops: [work.wait() for work in dist.batch_isend_irecv(ops)],
    }
