"""Bodies for task 4.14: steps on a clock, and a device, of the test's own."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from distlab.grade import WrongResult
from judging.calls import refusal_of, returned, typed
from phase4_production.given import StepTimes

# ("work", s), ("launch", s), ("part", name, events), ("fail", events), ("raise",) or ("end",)
Event = tuple[Any, ...]
Times = tuple[float, ...]  # step, data, compute, communication
FIELDS = ("step_s", "data_s", "compute_s", "communication_s")


class Failure(Exception):
    """What fails on purpose."""


class Device:
    """A clock that stands still, and kernels that have been started and take time."""

    def __init__(self) -> None:
        self.now_s, self.queued_s = 1000.0, 0.0

    def clock(self) -> float:
        """Tell the time."""
        return self.now_s

    def work(self, seconds: float) -> None:
        """Compute on the CPU."""
        self.now_s += seconds

    def launch(self, seconds: float) -> None:
        """Start kernels, and return at once."""
        self.queued_s += seconds

    def synchronize(self) -> None:
        """Wait for the kernels."""
        self.now_s += self.queued_s
        self.queued_s = 0.0


class MovingClock:
    """A clock that goes on by 1 s with each reading, and notes its readings."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


class Loader:
    """Yields 0, 1, 2, …; starting and each batch take time, and so does finding the end."""

    def __init__(self, device: Device, start_s: float, waits_s: Sequence[float], end_s: float):
        self.device, self.start_s, self.waits_s, self.end_s = device, start_s, waits_s, end_s
        self.asked = 0
        self.fails_at = -1

    def __iter__(self) -> Iterator[int]:
        self.device.work(self.start_s)
        return _Batches(self)


class _Batches(Iterator[int]):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __next__(self) -> int:
        loader, number = self.loader, self.loader.asked
        loader.asked += 1
        if number >= len(loader.waits_s):
            loader.device.work(loader.end_s)
            raise StopIteration
        loader.device.work(loader.waits_s[number])
        if number == loader.fails_at:
            raise Failure
        return number


def _taken(times: Any) -> Times:
    """Take the times of a step apart.

    Raises:
        WrongResult: it is something else.
    """
    if type(times).__name__ != "StepTimes":
        kind = type(returned("end_step", times)).__name__
        raise WrongResult(f"there should be StepTimes of given.py; there is a {kind}")
    return tuple(float(getattr(times, field)) for field in FIELDS)


def split(lesson: Any, events: Sequence[Event], is_synchronized: bool) -> list[Times]:
    """Let events happen; return the times of each step that was ended."""
    device, ended = Device(), []
    wait = {"synchronize": device.synchronize} if is_synchronized else {}
    timer = lesson.StepTimer(clock=device.clock, **wait)

    def happen(events: Sequence[Event]) -> None:
        for what, *values in events:
            if what in ("work", "launch"):
                getattr(device, what)(*values)
            elif what == "part":
                with timer.part(values[0]):
                    happen(values[1])
            elif what == "end":
                ended.append(_taken(timer.end_step()))
            elif what == "raise":
                raise Failure
            else:
                _fail(values[0])

    def _fail(events: Sequence[Event]) -> None:
        try:
            happen(events)
        except Failure:
            return
        raise WrongResult("an error inside of a part should be passed on; part has swallowed it")

    happen(events)
    return ended


def tick(lesson: Any, num_steps: int) -> dict[str, Any]:
    """Time steps on a clock that moves when it is read.

    Returns:
        The sum of all ``step_s``. And between which bounds it must be if no time is lost: the first
        step begins with one of the readings when the timer is made, the last one ends with one of
        the readings of the last ``end_step``.
    """
    clock = MovingClock()
    bounds_s = [clock.now_s + 1]
    timer = lesson.StepTimer(clock)
    bounds_s.append(clock.now_s)
    sum_s = 0.0
    for _ in range(num_steps):
        with timer.part("compute"):
            pass
        last_s = clock.now_s
        sum_s += _taken(timer.end_step())[0]
    (first_s, made_s), ended_s = bounds_s, clock.now_s
    return {"sum_s": sum_s, "least_s": last_s + 1 - made_s, "most_s": ended_s - first_s}


def mistype(lesson: Any, name: str) -> dict[str, Any]:
    """Enter a part that there isn't, inside of compute, and end the step.

    Returns:
        The error; whether what is inside has run; and the times of the step, of which 5 s are
        compute.
    """
    device, ran, found = Device(), [], {"type": "", "text": ""}
    timer = lesson.StepTimer(device.clock)

    def enter() -> None:
        with timer.part(name):
            ran.append(name)
            raise Failure

    with suppress(LookupError), timer.part("compute"):  # of a part that is open now, say
        device.work(1.0)
        with suppress(Failure):
            found = refusal_of(enter)
        device.work(4.0)
    times = [] if found["type"] != "ValueError" else [_taken(timer.end_step())]
    return {**found, "ran": bool(ran), "times": times}


def loop(lesson: Any, start_s: float, waits_s: Sequence[float], end_s: float) -> dict[str, Any]:
    """Compute with each batch for 2 s and log for 1 s, and end a step more after the loop.

    Returns:
        The batches; how many had been asked for when each came; and the times of the steps.
    """
    device = Device()
    loader = Loader(device, start_s, waits_s, end_s)
    timer = lesson.StepTimer(device.clock)
    batches, asked, times = [], [], []
    for batch in timer.batches(loader):
        batches.append(batch)
        asked.append(loader.asked)
        with timer.part("compute"):
            device.work(2.0)
        device.work(1.0)
        times.append(_taken(timer.end_step()))
    times.append(_taken(timer.end_step()))
    return {"batches": batches, "asked": asked, "times": times}


def leave_loop(lesson: Any, how: str) -> list[Times]:
    """Leave a loop over batches: by ``break``, or because the loader fails.

    Returns:
        The times of a step in which the second batch came, or failed to, and of one after it.
    """
    device = Device()
    loader = Loader(device, 0.0, [1.0, 2.0, 4.0], 0.0)
    loader.fails_at = 1 if how == "error" else -1
    timer = lesson.StepTimer(device.clock)
    with suppress(Failure):
        for batch in timer.batches(loader):
            if batch == 0:
                timer.end_step()
            elif how == "break":
                break
        else:
            raise WrongResult("the loader raised an error in batches, and nobody heard of it")
    times = [timer.end_step()]
    device.work(8.0)
    return [_taken(each) for each in (*times, timer.end_step())]


def train(lesson: Any, seconds: Sequence[float], num_steps: int) -> list[Times]:
    """Compute for this rank's seconds, and wait for the slowest: by the default clock."""
    timer, times, gradient = lesson.StepTimer(), [], torch.ones(1)
    for _ in range(num_steps):
        with timer.part("compute"):
            time.sleep(seconds[dist.get_rank()])
            with timer.part("communication"):
                dist.all_reduce(gradient)
        times.append(_taken(timer.end_step()))
    return times


def gather(lesson: Any, by_rank: Sequence[Times], group: Any = None) -> list[Times]:
    """Gather times that differ on all ranks."""
    mine = StepTimes(*by_rank[dist.get_rank(group)])
    options = {"group": group} if group else {}
    return [
        _taken(each) for each in typed("gather_times", lesson.gather_times(mine, **options), list)
    ]
