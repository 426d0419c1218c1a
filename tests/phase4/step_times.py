"""Bodies for task 4.14: programs of steps, on a clock and a device of the test's own.

A program is a list of events: ("work", s) computes on the CPU, ("launch", s) starts kernels,
("part", name, program) is inside of a part, ("fail", names, program) is inside of several, nested
parts that an error leaves, and ("end",) ends a step.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from distlab.grade import WrongResult
from judging.calls import refusal_of, returned, typed
from judging.expect import floats
from judging.tensors import given_group
from phase4_production.given import StepTimes

Event = tuple[Any, ...]
Times = tuple[float, ...]  # step, data, compute, communication
READING_S = 2.0**-30
PARTS = ("data", "compute", "communication")


class Failure(Exception):
    """An error that is raised on purpose."""


class Device:
    """A clock that work moves, and a little with each reading; and kernels that still run."""

    def __init__(self) -> None:
        self.now_s, self.queued_s = 1000.0, 0.0

    def clock(self) -> float:
        self.now_s += READING_S
        return self.now_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds

    def launch(self, seconds: float) -> None:
        self.queued_s += seconds

    def synchronize(self) -> None:
        self.now_s += self.queued_s
        self.queued_s = 0.0


class Loader:
    """Yields 0, 1, 2, …; starting, each batch and finding the end take time."""

    def __init__(self, device: Device, start_s: float, waits_s: Sequence[float], end_s: float):
        self.device, self.start_s, self.waits_s, self.end_s = device, start_s, waits_s, end_s
        self.asked, self.fails_at = 0, -1

    def __iter__(self) -> Iterator[int]:
        self.device.work(self.start_s)
        return self._batches()

    def _batches(self) -> Iterator[int]:
        for number, wait_s in enumerate(self.waits_s):
            self.asked += 1
            self.device.work(wait_s)
            if number == self.fails_at:
                raise Failure
            yield number
        self.device.work(self.end_s)


def draw(random: Random, num_steps: int, most: int) -> list[Event]:
    """Draw a program of steps with at most ``most`` events each, and as many inside of parts."""
    program = [event for _ in range(num_steps) for event in (*_draw(random, most), ("end",))]
    return [*program, ("end",)]


def _draw(random: Random, most: int, depth: int = 3) -> list[Event]:
    return [_draw_event(random, most, depth) for _ in range(random.randint(1, most))]


def _draw_event(random: Random, most: int, depth: int) -> Event:
    kind = random.choice(("work", "launch", "part", "part", "fail") if depth else ("work",))
    if kind in ("work", "launch"):
        return kind, random.randrange(1, 99) / 8
    inside = _draw(random, most, depth - 1)
    if kind == "part":
        return kind, random.choice(PARTS), inside
    return kind, random.choices(PARTS, k=random.randint(1, 2)), inside


def expected(program: Sequence[Event]) -> list[Times]:
    """Return the right times of each step; kernels count where they were started."""
    steps, times = list[Times](), dict.fromkeys(("step", *PARTS), 0.0)

    def walk(events: Sequence[Event], part: str) -> None:
        for kind, *values in events:
            if kind in ("work", "launch"):
                times["step"] += values[0]
                times[part] = times.get(part, 0.0) + values[0]
            elif kind == "end":
                steps.append(tuple(times[name] for name in ("step", *PARTS)))
                times.update(dict.fromkeys(times, 0.0))
            else:
                walk(values[1], values[0] if kind == "part" else values[0][-1])

    walk(program, "the rest")
    return steps


def split(lesson: Any, programs: Sequence[Sequence[Event]]) -> list[tuple[list[Times], float]]:
    """Run programs; return the times of each step, and how much of the time is in no step."""
    return [_split(lesson, program) for program in programs]


def _split(lesson: Any, program: Sequence[Event]) -> tuple[list[Times], float]:
    device, ended = Device(), list[Times]()
    timer = lesson.StepTimer(clock=device.clock, synchronize=device.synchronize)
    made_s = device.now_s

    def run(events: Sequence[Event]) -> None:
        for kind, *values in events:
            if kind in ("work", "launch"):
                getattr(device, kind)(*values)
            elif kind == "part":
                with timer.part(values[0]):
                    run(values[1])
            elif kind == "end":
                ended.append(_taken(timer.end_step()))
            else:
                fail(*values)

    def fail(names: Sequence[str], events: Sequence[Event]) -> None:
        try:
            with ExitStack() as parts:
                for name in names:
                    parts.enter_context(timer.part(name))
                run(events)
                raise Failure
        except Failure:
            return
        raise WrongResult("an error inside of a part should be passed on; part has swallowed it")

    run(program[:-1])
    last_s = device.now_s + READING_S  # the first reading of the last end_step
    run(program[-1:])
    return ended, last_s - made_s - sum(step_s for step_s, *_ in ended)


def _taken(times: Any, function: str = "end_step") -> Times:
    """Return the numbers of a StepTimes."""
    if type(times).__name__ != "StepTimes":
        kind = type(returned(function, times)).__name__
        raise WrongResult(f"there should be StepTimes of given.py; there is a {kind}")
    fields = (times.step_s, times.data_s, times.compute_s, times.communication_s)
    return floats(function, fields)


def mistype(lesson: Any, name: str) -> dict[str, Any]:
    """Enter an unknown part inside of compute, and end the step with 5 s of compute."""
    device, ran, refusal = Device(), [], {"type": "", "text": ""}
    timer = lesson.StepTimer(device.clock)

    def enter() -> None:
        with timer.part(name):
            ran.append(name)
            raise Failure

    with suppress(LookupError), timer.part("compute"):  # LookupError: of the part that is open now
        device.work(1.0)
        with suppress(Failure):
            refusal = refusal_of(enter)
        device.work(4.0)
    times = [] if refusal["type"] != "ValueError" else [_taken(timer.end_step())]
    return {**refusal, "ran": bool(ran), "times": times}


def loop(
    lesson: Any, start_s: float, waits_s: Sequence[float], end_s: float, leave: str = ""
) -> dict[str, Any]:
    """Compute with each batch for 2 s and log for 1 s; after the loop, end a step with 8 s of work.

    Args:
        lesson: Lesson of the learner.
        start_s: Time that starting the loader takes.
        waits_s: Time of each batch.
        end_s: Time in which the loader finds out that there is no further batch.
        leave: How the second batch ends the loop: "break", "error", or not at all.
    """
    device = Device()
    loader = Loader(device, start_s, waits_s, end_s)
    loader.fails_at = 1 if leave == "error" else -1
    timer = lesson.StepTimer(device.clock)
    batches, asked, times = [], [], []
    with suppress(Failure):
        for batch in timer.batches(loader):
            if leave == "break" and batch == 1:
                break
            batches.append(batch)
            asked.append(loader.asked)
            with timer.part("compute"):
                device.work(2.0)
            device.work(1.0)
            times.append(_taken(timer.end_step()))
        else:
            if leave:
                raise WrongResult("the loader raised an error, and batches has swallowed it")
    device.work(8.0)
    times.append(_taken(timer.end_step()))
    return {"batches": batches, "asked": asked, "times": times}


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
    gathered = lesson.gather_times(mine, **given_group(group))
    return [_taken(times, "gather_times") for times in typed("gather_times", gathered, list)]
