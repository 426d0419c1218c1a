"""On one GPU, the races that are reported are those of the sanitizer that torch has for CUDA."""

import logging
import random
import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch.cuda import _sanitizer

from distlab.sim import Options, simulate

NUM_STREAMS, NUM_TENSORS, NUM_EVENTS = 4, 4, 3
NUM_TRACES, NUM_WORLDS = 200, 2
Race = tuple[int, int, int]  # tensor, stream of the earlier use, stream of the later one


class RandomTrace:
    """A program, and the lines that torch's handler of such traces reports.

    Attributes:
        lines: The program, an operation in each line.
        racing: Numbers of the lines in which torch reports a race.
        new: Those in which a race is between other streams, or over another tensor, than before.
    """

    def __init__(self, seed: int) -> None:
        self._draw, self._torch = random.Random(seed), _sanitizer.EventHandler()
        self.lines: list[str] = []
        self.racing: list[int] = []
        self.new: list[int] = []
        self._known: set[Race] = set()
        kinds = [self._launch, self._record, self._wait, self._synchronize]
        for kind in self._draw.choices(kinds, [55, 17, 18, 10], k=self._draw.randint(5, 40)):
            kind(self._draw.randrange(NUM_STREAMS), self._draw.randrange(NUM_EVENTS))

    def _launch(self, stream: int, _event: int) -> None:
        source, target = self._draw.sample(range(NUM_TENSORS), 2)
        call, read, written = self._draw.choice(
            [
                (f"t[{source}].sum()", [source], []),
                (f"t[{target}].add_(1)", [], [target]),
                (f"t[{target}].add_(t[{source}])", [source], [target]),
            ]
        )
        self.lines.append(f"with torch.cuda.stream(s[{stream}]): {call}")
        names = {tensor: [""] for tensor in [*read, *written]}
        errors = self._torch._handle_kernel_launch(stream, read, written, {}, "", names)
        races = {(e.data_ptr, e.previous_access.stream, stream) for e in errors}
        if races:
            self.racing.append(len(self.lines))
        if races - self._known:
            self.new.append(len(self.lines))
        self._known |= races

    def _record(self, stream: int, event: int) -> None:
        self.lines.append(f"e[{event}].record(s[{stream}])")
        self._torch._handle_event_record(event, stream)

    def _wait(self, stream: int, event: int) -> None:
        self.lines.append(f"s[{stream}].wait_event(e[{event}])")
        self._torch._handle_event_wait(event, stream)

    def _synchronize(self, stream: int, event: int) -> None:
        calls: list[tuple[str, Callable[[], None]]] = [
            ("torch.cuda", self._torch._handle_device_synchronization),
            (f"s[{stream}]", partial(self._torch._handle_stream_synchronization, stream)),
            (f"e[{event}]", partial(self._torch._handle_event_synchronization, event)),
        ]
        waiter, tell_torch = self._draw.choice(calls)
        self.lines.append(f"{waiter}.synchronize()")
        tell_torch()


def run(codes: dict[str, str]) -> None:
    torch.cuda.set_device(0)
    for file, code in codes.items():
        names = {
            "s": [torch.cuda.Stream() for _ in range(NUM_STREAMS)],
            "e": [torch.cuda.Event() for _ in range(NUM_EVENTS)],
            "t": [torch.zeros(4, device="cuda") for _ in range(NUM_TENSORS)],
        }
        torch.cuda.synchronize()
        exec(compile(code, file, "exec"), {"torch": torch, **names})
        torch.cuda.synchronize()


def lines_in(wrong: list[str], file: str) -> Iterator[int]:
    """Yield the later line of each finding in a program."""
    for finding in wrong:
        if file in finding:
            yield max(int(line) for line in re.findall(rf"{file}:(\d+)", finding)[:2])


@pytest.mark.parametrize("world", range(NUM_WORLDS))
def test_races_are_those_that_torchs_sanitizer_reports(world: int) -> None:
    logging.disable(logging.CRITICAL)  # torch tells of each event that it has not seen created
    try:
        seeds = range(world, NUM_TRACES, NUM_WORLDS)
        traces = {f"trace_{seed}.py": RandomTrace(seed) for seed in seeds}
    finally:
        logging.disable(logging.NOTSET)
    codes = {file: "\n".join(trace.lines) for file, trace in traces.items()}
    options = Options(semantics="nccl", has_events=False)
    ran = simulate(partial(run, codes), 1, cluster="dgx-h100", options=options)
    assert ran.gpu_time is not None
    for file, trace in traces.items():
        found = set(lines_in(ran.gpu_time.wrong, file))
        assert set(trace.new) <= found, file
        # After a racing read, torch compares with that read only, no longer with the write.
        before_a_race = {line for line in found if line <= min(trace.racing, default=10**9)}
        assert before_a_race <= set(trace.racing), file
