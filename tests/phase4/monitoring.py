"""Bodies (functions that ranks run) for tasks 4.14 to 4.16, which measure steps and ranks."""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from io import StringIO
from math import inf
from random import Random
from statistics import median_low
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distlab.grade import WrongResult
from judging.calls import refusal_of, returned, typed
from judging.expect import floats
from judging.tensors import given_group
from phase4_production.given import StepTimes

# Step programs, on the test's own clock and device
#
# A program is a list of events: ("work", s) computes on the CPU, ("launch", s) starts kernels,
# ("part", name, program) runs a program inside a part, ("fail", names, program) runs one inside
# nested parts and leaves them by an error, and ("end",) ends a step.

Event = tuple[Any, ...]
Times = tuple[float, ...]  # step, data, compute, communication
READING_S = 2.0**-30
PARTS = ("data", "compute", "communication")


class Failure(Exception):
    """An error that is raised on purpose."""


class Device:
    """A device that runs kernels, with a clock that advances with work and slightly when read."""

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
    """Yields 0, 1, 2, …, and takes time to start, to load each batch and to find the end."""

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


def draw_program(random: Random, num_steps: int, most: int) -> list[Event]:
    """Draw a program of steps; each step and each part has at most ``most`` events."""
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


def times_of(program: Sequence[Event]) -> list[Times]:
    """Return the right times of each step; kernels count where they are started."""
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
    """Run programs; return the times of each step, and how much time belongs to no step."""
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
                ended.append(_times_taken(timer.end_step()))
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
    last_s = device.now_s + READING_S  # the first time that the last end_step reads
    run(program[-1:])
    return ended, last_s - made_s - sum(step_s for step_s, *_ in ended)


def _times_taken(times: Any, function: str = "end_step") -> Times:
    """Return the values of a StepTimes."""
    if type(times).__name__ != "StepTimes":
        kind = type(returned(function, times)).__name__
        raise WrongResult(f"there should be StepTimes of given.py; there is a {kind}")
    fields = (times.step_s, times.data_s, times.compute_s, times.communication_s)
    return floats(function, fields)


def mistype(lesson: Any, name: str) -> dict[str, Any]:
    """Enter an unknown part inside compute, and end the step after 5 s of compute in all."""
    device, ran, refusal = Device(), [], {"type": "", "text": ""}
    timer = lesson.StepTimer(device.clock)

    def enter() -> None:
        with timer.part(name):
            ran.append(name)
            raise Failure

    with suppress(LookupError), timer.part("compute"):  # a part left open may raise a LookupError
        device.work(1.0)
        with suppress(Failure):
            refusal = refusal_of(enter)
        device.work(4.0)
    times = [] if refusal["type"] != "ValueError" else [_times_taken(timer.end_step())]
    return {**refusal, "ran": bool(ran), "times": times}


def loop(
    lesson: Any, start_s: float, waits_s: Sequence[float], end_s: float, leave: str = ""
) -> dict[str, Any]:
    """Compute with each batch for 2 s and log for 1 s; after the loop, end a step with 8 s of work.

    Args:
        lesson: The learner's lesson.
        start_s: How long the loader takes to start.
        waits_s: How long it takes to load each batch.
        end_s: How long it takes to find out that there are no more batches.
        leave: How the second batch ends the loop: "break", "error", or "" if it does not.
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
            times.append(_times_taken(timer.end_step()))
        else:
            if leave:
                raise WrongResult("the loader raised an error, and batches has swallowed it")
    device.work(8.0)
    times.append(_times_taken(timer.end_step()))
    return {"batches": batches, "asked": asked, "times": times}


def train(lesson: Any, seconds: Sequence[float], num_steps: int) -> list[Times]:
    """Train on the default clock; in each step, compute, and wait for the slowest rank."""
    timer, times, gradient = lesson.StepTimer(), [], torch.ones(1)
    for _ in range(num_steps):
        with timer.part("compute"):
            time.sleep(seconds[dist.get_rank()])
            with timer.part("communication"):
                dist.all_reduce(gradient)
        times.append(_times_taken(timer.end_step()))
    return times


def gather(lesson: Any, by_rank: Sequence[Times], group: Any = None) -> list[Times]:
    """Gather the times of all ranks, which differ."""
    mine = StepTimes(*by_rank[dist.get_rank(group)])
    gathered = lesson.gather_times(mine, **given_group(group))
    return [_times_taken(times, "gather_times") for times in typed("gather_times", gathered, list)]


# Rates of jobs, models with known FLOPs, and memory

BYTES_OF_BALLAST = 160 * 2**20


def rate(
    lesson: Any, function: str, by_rank: Sequence[Sequence[float]], group: Any = None
) -> float:
    """Call ``throughput`` or ``mfu`` with this rank's arguments."""
    mine = by_rank[dist.get_rank(group)]
    return typed(function, getattr(lesson, function)(*mine, **given_group(group)), float)


def _step(kind: str, m: int, k: int, h: int, n: int) -> tuple[nn.Module, Callable[[], object]]:
    """Make a model and a step of a kind that ``judge_monitoring.COUNTS`` lists."""
    model: nn.Module = nn.Sequential(nn.Linear(k, h), nn.ReLU(), nn.Dropout(), nn.Linear(h, n))
    x, recomputed = torch.randn(m, k), cast(Any, checkpoint)
    if kind == "convolution":
        model, x = nn.Conv2d(k, h, 3, padding=1), torch.randn(m, k, n, n)

    def backward() -> None:
        is_kept = kind != "recomputed"
        (model(x) if is_kept else recomputed(model, x, use_reentrant=False)).sum().backward()

    return model, (lambda: model(x)) if kind == "forward only" else backward


def count(lesson: Any, kind: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Count the FLOPs of a step, and compare its effects with those of an uncounted step."""
    torch.manual_seed(5)
    model, step = _step(kind, *sizes)
    calls, printed, generator = [], StringIO(), torch.get_rng_state()

    def counted() -> None:
        calls.append(kind)
        step()

    with redirect_stdout(printed):
        flops = typed("count_flops", lesson.count_flops(counted), int)
    gradients, generator_after = _taken_gradients(model), torch.get_rng_state()
    torch.set_rng_state(generator)
    step()
    uncounted = _taken_gradients(model)
    is_same = len(gradients) == len(uncounted) and all(map(torch.equal, gradients, uncounted))
    is_drawn_alike = generator_after.equal(torch.get_rng_state())
    other = [] if is_same else ["the gradients"]
    other += [] if is_drawn_alike else ["the state of torch's generator"]
    return {"flops": flops, "calls": len(calls), "printed": printed.getvalue(), "other": other}


def _taken_gradients(model: nn.Module) -> list[Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


def process_memory(lesson: Any) -> tuple[int, int, int]:
    """Return the system's peak before, the peak that the lesson reports, and the system's after."""
    ballast = torch.ones(BYTES_OF_BALLAST, dtype=torch.uint8)
    del ballast
    before = _max_rss_bytes()
    answer = typed("peak_memory_bytes", lesson.peak_memory_bytes(torch.device("cpu")), int)
    return before, answer, _max_rss_bytes()


def _max_rss_bytes() -> int:
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def gpu_memory(lesson: Any, index: int, num_bytes: int) -> Any:
    """Return the peak that the lesson reports for a fake GPU.

    For a GPU, torch reports ``num_bytes`` plus the GPU's index.
    """

    def peak(device: Any = None) -> int:
        if device is None:  # the current device, GPU 0
            return num_bytes
        return num_bytes + (device if isinstance(device, int) else torch.device(device).index)

    torch.cuda.max_memory_allocated = peak
    torch.cuda.memory_stats = lambda device=None: {"allocated_bytes.all.peak": peak(device)}
    return lesson.peak_memory_bytes(torch.device("cuda", index))


# Slow ranks, and a model of the detector

Work = tuple[float, float]  # data and compute seconds of a rank in a step
Verdict = list[tuple[int, str, float]]  # rank, part, ratio
# Exact in float64, so that ties are exact too; the last value is not exact in float32.
TIMES_S = (0.0, 0.25, 0.25, 0.25, 1.0, 1.0, 1.5, 8.0, 1.5 + 2.0**-24)


class Story(NamedTuple):
    """The work of each rank in each step, and the options of the detector."""

    steps: Sequence[Sequence[Work]]
    options: Mapping[str, float]


def draw_story(random: Random, num_ranks: int) -> Story:
    """Draw a story of one to three whole windows, and some steps of another."""
    window = random.choice((1, 1, 2, 3, 4, 5))
    factor = random.choice((1.5, 1.5, 2.0))
    num_steps = random.randint(1, 3) * window + random.randrange(window)
    typical = [random.choice(TIMES_S) for _ in "dc"]
    steps = [[_draw_work(random, typical) for _ in range(num_ranks)] for _ in range(num_steps)]
    return Story(steps, {"window": window, "factor": factor})


def _draw_work(random: Random, typical: Sequence[float]) -> Work:
    data_s, compute_s = (s if random.random() < 0.6 else random.choice(TIMES_S) for s in typical)
    return data_s, compute_s


def verdicts_of(story: Story, *, adds_medians: bool = False) -> list[Verdict]:
    """Return the right verdict after each step; a tie between parts reads "data or compute".

    With ``adds_medians``, return those of a detector whose own work is a sum of two medians.
    """
    window = int(story.options.get("window", 50))
    ends = range(1, len(story.steps) + 1)
    factor = story.options.get("factor", 1.3)
    return [
        [] if end % window else _verdict(story.steps[end - window : end], factor, adds_medians)
        for end in ends
    ]


def _verdict(steps: Sequence[Sequence[Work]], factor: float, adds_medians: bool) -> Verdict:
    by_rank = [
        _medians([(data_s + compute_s, data_s, compute_s) for data_s, compute_s in of_rank])
        for of_rank in zip(*steps, strict=True)
    ]
    if adds_medians:
        by_rank = [[data_s + compute_s, data_s, compute_s] for _, data_s, compute_s in by_rank]
    typical_s, *typical_parts_s = _medians(by_rank)
    stragglers = []
    for rank, (work_s, *parts_s) in enumerate(by_rank):
        if work_s > factor * typical_s:
            data_s, compute_s = (s - t for s, t in zip(parts_s, typical_parts_s, strict=True))
            part = "data" if data_s > compute_s else "compute"
            part = part if data_s != compute_s else "data or compute"
            stragglers.append((rank, part, work_s / typical_s if typical_s else inf))
    return stragglers


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [median_low(column) for column in zip(*rows, strict=True)]


def watch(lesson: Any, stories: Sequence[Story], group: Any = None) -> list[list[Verdict]]:
    """Run a detector on each story; in each step, all ranks wait for the slowest one."""
    rank = dist.get_rank(group)
    verdicts: list[list[Verdict]] = []
    for story in stories:
        detector = lesson.StragglerDetector(**story.options, **given_group(group))
        verdicts.append([])
        for works in story.steps:
            step_s = max(map(sum, works)) + 0.5
            waited_s = step_s - sum(works[rank]) - 0.25
            verdicts[-1].append(
                _verdict_taken(detector.add(StepTimes(step_s, *works[rank], waited_s)))
            )
    return verdicts


def _verdict_taken(stragglers: Any) -> Verdict:
    for straggler in typed("add", stragglers, list):
        if type(straggler).__name__ != "Straggler":
            raise WrongResult(f"add should return a list of Straggler; {straggler!r:.60} is in it")
    return [(int(s.rank), str(s.part), *floats("add", [s.ratio])) for s in stragglers]  # type: ignore[misc]
