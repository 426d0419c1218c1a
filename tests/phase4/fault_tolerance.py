"""Bodies (functions that ranks run) for tasks 4.5, 4.7 and 4.8: reports, stops, save intervals."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from judging.calls import case_told, typed
from judging.tensors import given_group, is_simulated

# Ranks that report, fall silent or are slow, on the test's own clock

Event = tuple[Any, ...]  # ("beat", rank, step, busy_s), ("wait", seconds) or ("poll",)
Poll = list[tuple[int, int, float, str]]  # one entry per rank: rank, step, silent_s, status
STORE_S = 0.5  # timeout for getting a missing key


class CountedStore(dist.Store):
    """A store that records the name of each method called; each call is one message."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.calls = dist.HashStore(), list[str]()
        self.kept.set_timeout(timedelta(seconds=STORE_S))

    def __getattribute__(self, name: str) -> Any:
        """Return a wrapper around the method of ``kept`` that also records each call."""
        if name.startswith("_") or name in ("kept", "calls"):
            return super().__getattribute__(name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            return getattr(self.kept, name)(*args, **options)

        return call


def watch_all(lesson: Any, stories: Sequence[Any]) -> list[list[Poll]]:
    """Play stories, each with its own ranks; return the results of each story's polls.

    If a poll waits for a missing key, the story ends with an empty poll.
    """
    return [_watch(lesson, *story) for story in stories]


def _watch(
    lesson: Any, num_ranks: int, events: Sequence[Event], options: dict[str, Any]
) -> list[Poll]:
    store, now_s = CountedStore(), 1000.0
    ranks = [lesson.Heartbeat(store, rank) for rank in range(num_ranks)]
    monitor = lesson.HeartbeatMonitor(store, num_ranks, clock=lambda: now_s, **options)
    polls: list[Poll] = []
    for kind, *values in events:
        if kind == "beat":
            rank, step, busy_s = values
            ranks[rank].beat(step, busy_s)
        elif kind == "wait":
            now_s += values[0]
        else:
            try:
                ranks_of_poll = typed("poll", monitor.poll(), list)
            except dist.DistStoreError:
                return [*polls, []]
            polls.append([(h.rank, h.step, h.silent_s, h.status) for h in ranks_of_poll])
    return polls


def send(lesson: Any, num_ranks: int, num_steps: int) -> dict[str, list[list[str]]]:
    """Report and poll; return which methods of the store each report and each poll calls."""
    store = CountedStore()
    ranks = [lesson.Heartbeat(store, rank) for rank in range(num_ranks)]
    monitor = lesson.HeartbeatMonitor(store, num_ranks, timeout_s=10.0, clock=lambda: 1000.0)
    calls: dict[str, list[list[str]]] = {"report": [], "poll": []}
    for step in range(num_steps):
        for rank in ranks:
            store.calls.clear()
            rank.beat(step, 0.1)
            calls["report"].append([*store.calls])
        store.calls.clear()
        monitor.poll()
        calls["poll"].append([*store.calls])
    return calls


# Training that is asked to stop
#
# Simulated ranks are threads, which get no signals. Their handlers are therefore recorded, and
# called as the interpreter would call them. Processes get real signals. A signal that the request
# should catch but does not is recorded too.

SAVE_S = 20e-3
NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_handlers: dict[tuple[int, int], Any] = {}  # (thread of a simulated rank, signal) -> handler


class Plan(NamedTuple):
    """Signals to the ranks, and the ranks' behaviour."""

    # Rank, step and signal; the signal arrives while the rank computes this step.
    arrivals: tuple[tuple[int, int, int], ...] = ()
    signals: tuple[int, ...] = ()  # signals to be caught; empty for the default ones
    num_steps: int = 5  # number of steps; ranks ask after each, whatever the answer
    leaves: bool = False  # whether ranks leave when the answer is true
    is_interrupted: bool = False  # whether another signal comes while they save


def train(lesson: Any, plan: Plan, group: Any = None) -> dict[str, Any]:
    """Train, and ask after every step whether to stop; saving takes longer the higher the rank."""
    facts: dict[str, Any] = {"answers": [], "computed": [], "saved_s": [], "code": None}
    with _handled() as signals:
        try:
            with _request(lesson, plan, group) as stop:
                _train(stop, plan, dist.get_rank(group), signals, facts)
        except SystemExit as exit:
            facts["code"] = exit.code
        return {**facts, "left_s": time.monotonic(), **signals.report()}


def _train(stop: Any, plan: Plan, rank: int, signals: "Signals", facts: dict[str, Any]) -> None:
    def save() -> None:
        if plan.is_interrupted:
            signals.send(signal.SIGTERM)
        time.sleep(SAVE_S * rank)
        facts["saved_s"].append(time.monotonic())

    for step in range(plan.num_steps):
        for asked, when, number in plan.arrivals:
            if (asked, when) == (rank, step):
                signals.send(number)
        facts["computed"].append(step)
        facts["answers"].append(typed("agreed", stop.agreed(), bool))
        if plan.leaves and facts["answers"][-1]:
            stop.leave(save)


def train_while_others_wait(lesson: Any, late: int, asked: int) -> list[bool]:
    """Delay one rank's second step, and ask another rank, which waits for it, to stop."""
    signals, answers = Signals(), []
    with lesson.StopRequest() as stop:
        for step in range(4):
            if step == 1 and dist.get_rank() == asked:
                threading.Timer(SAVE_S, signals.send, [signal.SIGTERM]).start()
            if step == 1 and dist.get_rank() == late:
                time.sleep(3 * SAVE_S)
            answers.append(typed("agreed", stop.agreed(), bool))
    return answers


def fail(lesson: Any) -> dict[str, Any]:
    """Fail in a step; return whether its error is passed on, and ``Signals.report()``."""
    signals, has_come_out = Signals(), False
    handlers = [_a_handler, signal.SIG_IGN, signal.getsignal(signal.SIGUSR2)]
    signals.install(dict(zip(NUMBERS, handlers, strict=True)))
    stop = lesson.StopRequest()
    too_early = signals.report()["changed"]
    try:
        with stop:
            raise ArithmeticError("in a step")
    except ArithmeticError:
        has_come_out = True
    return {"came out": has_come_out, "too early": too_early, **signals.report()}


def fail_to_save(lesson: Any) -> str:
    """Leave with a save that fails; return the name of the error that comes out, or ""."""

    def save() -> None:
        raise OSError("no space left")

    Signals()
    try:
        with lesson.StopRequest() as stop:
            stop.leave(save)
    except (OSError, SystemExit) as error:
        return type(error).__name__
    return ""


def _request(lesson: Any, plan: Plan, group: Any) -> Any:
    signals = [plan.signals] if plan.signals else []
    return lesson.StopRequest(*signals, **given_group(group))


def _a_handler(number: int, frame: object) -> None:
    """Do nothing, as a caller's handler might."""


class Signals:
    """Sends signals to this rank, and records those that the request did not catch."""

    def __init__(self) -> None:
        # Sentences about signals that reached an earlier handler, or no handler.
        self.let_through: list[str] = []
        self.before: dict[int, Any] = {}  # handlers outside the with statement
        self.thread = threading.get_ident()
        self.is_simulated = is_simulated()
        if self.is_simulated:
            signal.signal, signal.getsignal = _note, _noted  # type: ignore[assignment]

    def install(self, handlers: dict[int, Any]) -> None:
        """Install handlers, as the caller of a lesson may have done."""
        for number, handler in handlers.items():
            signal.signal(number, handler)
            self.before[number] = signal.getsignal(number)

    def report(self) -> dict[str, list[str]]:
        """Return the signals whose handlers have changed, and those that were let through."""
        changed = [n for n, handler in self.before.items() if signal.getsignal(n) is not handler]
        names = [signal.Signals(number).name for number in changed]
        return {"changed": names, "let through": self.let_through}

    def send(self, number: int) -> None:
        """Send a signal to this rank."""
        if not self.is_simulated:
            os.kill(os.getpid(), number)
            return
        handler = _handlers.get((self.thread, number), signal.SIG_DFL)
        if callable(handler):
            handler(number, None)
        elif handler == signal.SIG_DFL:
            self._note(number, "met the default handling, which ends a process at once")

    def handle(self, number: int, frame: object) -> None:
        """Record a signal, where a caller's real handler might end the process."""
        self._note(number, "reached the handler that was there before the with statement")

    def _note(self, number: int, what: str) -> None:
        self.let_through.append(f"{signal.Signals(number).name} {what}")


@contextmanager
def _handled() -> Iterator[Signals]:
    """Install a caller's own handler for all signals, and remove it at the end."""
    signals = Signals()
    first = {number: signal.getsignal(number) for number in NUMBERS}
    signals.install(dict.fromkeys(NUMBERS, signals.handle))
    try:
        yield signals
    finally:
        signals.install(first)


def _note(number: int, handler: Any) -> Any:
    before = _noted(number)
    _handlers[threading.get_ident(), number] = handler
    return before


def _noted(number: int) -> Any:
    return _handlers.get((threading.get_ident(), number), signal.SIG_DFL)


# Intervals between saves


def seconds(lesson: Any, function: str, calls: Sequence[Sequence[float]]) -> list[float]:
    """Call a function with times as floats, and the number of nodes as the last argument."""
    results = []
    for call in calls:
        times_s, num_nodes = [*map(float, call[:-1])], call[-1:]
        arguments = [*times_s, *(num_nodes if call[-1] != 1 else [])]  # one node is the default
        with case_told("with the arguments " + ", ".join(f"{number:g}" for number in arguments)):
            results.append(float(typed(function, getattr(lesson, function)(*arguments), float)))
    return results
