"""Find out where each rank's program ended: at a ``return``, or on its last line.

A frame that is kept alive remembers the line on which it ended. So a trace function captures the
outermost frame of each rank's program when the program starts, and then removes itself, because
tracing every call would slow the program down.
"""

import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType

from torch.optim.optimizer import register_optimizer_step_pre_hook

from distlab.sim.engine.clock import Clock
from distlab.sim.engine.faults import Faults
from distlab.sim.engine.scheduler import NEVER, STUCK, Scheduler
from distlab.sim.isolation.rank_states import RankStates
from distlab.sim.reporting.sites import (
    GIVEN,
    PROGRAM,
    SIMULATOR,
    Death,
    Exit,
    Places,
    Site,
    outside,
)

OURS = str(Path(__file__).parents[2])  # folder of the code that calls the program
SCRIPT = "<module>"
STARTERS = ("call", "_run_program", "_run_child")  # our functions that call the program
LEADERS = ("_on_cpu", "_be_main", "_be_child")  # our functions that a starter may call before it
_IS_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
MAX_CALLS = 10_000  # limit on traced calls: high, since unpickling the program may import modules


class Exits:
    """The places at which ranks left their process groups and at which their programs ended.

    Attributes:
        known: The exits recorded so far, by rank.
        left_groups: The lines that destroyed the process groups of ranks without one, by rank.
        deaths: The ranks that a fault has killed.
        num_steps: Number of optimizer steps that each rank has begun.
    """

    def __init__(self, places: Places) -> None:
        self.known: dict[int, Exit] = {}
        self.left_groups: dict[int, Site] = {}
        self.deaths: dict[int, Death] = {}
        self.num_steps: Counter[int] = Counter()
        self._places = places
        self._programs: dict[int, _Program] = {}

    def forget(self) -> None:
        """Forget the programs of the last run, whose frames keep their variables alive."""
        self.known.clear()
        self._programs.clear()

    @contextlib.contextmanager
    def watched(self, rank: int) -> Iterator[None]:
        """Record the program's last line, unless a debugger or coverage tool is tracing it."""
        program = self._programs[rank] = _Program(self._places)
        # Python 3.11 never gets past a traced call while an exception is due in another thread.
        is_free = sys.gettrace() is None and not STUCK
        if is_free:
            sys.settrace(program.look)
        try:
            yield
            program.let_go()  # not after an error, whose traceback needs the frames
        finally:
            if is_free:
                sys.settrace(None)
            if program.last is not None:
                known = self.known.get(rank)
                self.known[rank] = Exit(program.last, known.left_group_at if known else None)

    def died(self, rank: int, killed: BaseException, time_s: float) -> None:
        """Record when and where a fault has killed a rank, whose program ``killed`` has left."""
        at = self._places.raised_at(killed)
        self.deaths[rank] = Death(at, time_s, self.num_steps[rank])

    def joined(self, rank: int) -> None:
        """Record that a rank joins the world, and look for the ``main()`` that made it join."""
        self.known.pop(rank, None)
        self.left_groups.pop(rank, None)
        if rank in self._programs:
            self._programs[rank].look_for_main(outside())

    def left(self, rank: int) -> None:
        """Record that a rank destroys its process group."""
        site = self.left_groups[rank] = self._places.call_site()[0]
        self.known[rank] = Exit(site, left_group_at=site)


class _Program:
    """The outermost frame of a rank's program and, in a script, the frame of its ``main()``."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._frame: FrameType | None = None
        self._main: FrameType | None = None
        self._main_called_at = 0  # line of the script that called ``main()``
        self.last: Site | None = None  # line on which the program ended
        self._num_calls = 0

    def look(self, frame: FrameType, *_: object) -> None:
        """Trace a thread's calls until the program's frame appears."""
        self._num_calls += 1
        code, caller = frame.f_code, frame.f_back.f_code if frame.f_back else None
        kind = (
            SIMULATOR if code.co_filename.startswith(OURS) else self._places.kind(code.co_filename)
        )
        is_started = caller and caller.co_name in STARTERS and caller.co_filename.startswith(OURS)
        is_called = is_started and code.co_name not in LEADERS
        if is_called and kind == PROGRAM and not code.co_flags & _IS_SUSPENDED:
            self._frame = frame
        # Tracing ends with the starter's call, even if that call enters our own code or a torch
        # decorator, not the program.
        if is_called or kind == GIVEN or self._num_calls == MAX_CALLS:
            sys.settrace(None)

    def look_for_main(self, frame: FrameType | None) -> None:
        """Find the frame of the function that the script called, given a frame inside that call."""
        script = self._frame
        if self._main or script is None or script.f_code.co_name != SCRIPT:
            return
        while frame is not None and frame.f_back is not script:
            frame = frame.f_back
        self._main, self._main_called_at = frame, script.f_lineno

    def let_go(self) -> None:
        """Record the last line, and drop the frames, which keep the program's variables alive."""
        last, frames = self._frame, [self._frame, self._main]
        if self._main and self._frame and self._frame.f_lineno == self._main_called_at:
            last = self._main  # the script did nothing after the call
        if last:
            self.last = last.f_code.co_filename, last.f_lineno, last.f_code.co_name
        self._frame = self._main = None
        for frame in filter(None, frames):
            frame.clear()


@contextlib.contextmanager
def deaths_due(
    faults: Faults, scheduler: Scheduler, clock: Clock, rank_states: RankStates, exits: Exits
) -> Iterator[None]:
    """Kill ranks as ``faults`` demands: at a given time, or when an optimizer step begins."""
    timers = []
    for number, at_s in faults.kill_ranks.items():
        rank = scheduler.ranks[number]
        if at_s > scheduler.now_s:
            timers.append(scheduler.at(at_s, partial(scheduler.kill, rank), is_work=False))
        elif not rank.is_killed:  # its program does not begin
            exits.deaths[number] = Death(None, at_s, exits.num_steps[number])
            rank.is_killed = True
            scheduler.kill(rank)

    def begin_step(*_: object) -> None:
        if not rank_states.is_in_rank():
            return
        rank = clock.current.rank
        if rank.clock_s > faults.kill_ranks.get(rank.number, NEVER):
            return  # a dead rank, whose program goes on until its next call
        exits.num_steps[rank.number] += 1
        if exits.num_steps[rank.number] == faults.kill_at_steps.get(rank.number):
            clock.trace.killed_in_step_s[rank.number] = rank.clock_s
            scheduler.kill(rank)
            scheduler.act()

    hook = register_optimizer_step_pre_hook(begin_step)
    try:
        yield
    finally:
        hook.remove()
        for timer in timers:
            timer.action = None
