"""Bodies for task 4.7: training that is asked to stop.

In the simulated world ranks are threads, which get no signals; so handlers are noted there, and
called as the interpreter would. Processes get real signals.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from judging.calls import typed

SAVE_S = 20e-3
NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_handlers: dict[tuple[int, int], Any] = {}  # of simulated ranks: (thread, signal) -> handler


class Plan(NamedTuple):
    """When which rank is asked to stop.

    Attributes:
        arrivals: rank, step and signal; it comes while the rank computes this step.
        signals: that are to be caught; empty: those that are by default.
        num_steps: for which the ranks go on asking, whatever they hear.
    """

    arrivals: tuple[tuple[int, int, int], ...] = ()
    signals: tuple[int, ...] = ()
    num_steps: int = 5


def train(lesson: Any, plan: Plan, group: Any = None) -> dict[str, Any]:
    """Train, and ask after every step whether to stop.

    Returns:
        The answers; the steps that were computed to their end; and the signals that are not handled
        as before.
    """
    send, rank = _sender(), dist.get_rank(group)
    before = [signal.getsignal(number) for number in NUMBERS]
    computed, answers = [], []
    with _request(lesson, plan, group) as stop:
        for step in range(plan.num_steps):
            for asked, when, number in plan.arrivals:
                if (asked, when) == (rank, step):
                    send(number)
            computed.append(step)
            answers.append(typed("agreed", stop.agreed(), bool))
    after = [signal.getsignal(number) for number in NUMBERS]
    changed = [int(n) for n, was, now in zip(NUMBERS, before, after, strict=True) if was is not now]
    return {"answers": answers, "computed": computed, "changed": changed}


def train_while_others_wait(lesson: Any, late: int, asked: int) -> list[bool]:
    """Let a rank come late to the second step, and ask another to stop while it waits for it."""
    send, answers = _sender(), []
    with lesson.StopRequest() as stop:
        for step in range(4):
            if step == 1 and dist.get_rank() == asked:
                threading.Timer(SAVE_S, send, [signal.SIGTERM]).start()
            if step == 1 and dist.get_rank() == late:
                time.sleep(3 * SAVE_S)
            answers.append(typed("agreed", stop.agreed(), bool))
    return answers


def fail(lesson: Any) -> list[int]:
    """Fail in a step; return the signals that are not handled as before."""
    _sender()
    mine = [_a_handler, signal.SIG_IGN, signal.getsignal(signal.SIGUSR2)]
    before = [_installed(number, own) for number, own in zip(NUMBERS, mine, strict=True)]
    with suppress(ArithmeticError), lesson.StopRequest():
        raise ArithmeticError("in a step")
    after = [signal.getsignal(number) for number in NUMBERS]
    return [int(n) for n, was, now in zip(NUMBERS, before, after, strict=True) if was is not now]


def ask(lesson: Any, num_steps: int, group: Any = None) -> list[bool]:
    """Ask again and again, without a signal: what that costs is counted."""
    stop = lesson.StopRequest(group=group) if group else lesson.StopRequest()
    return [typed("agreed", stop.agreed(), bool) for _ in range(num_steps)]


def leave(lesson: Any, is_interrupted: bool, group: Any = None) -> dict[str, Any]:
    """Stop as soon as all agree; each rank saves for another time.

    Returns:
        How often it has saved, when it had, when it left, and with which code; None: it returned.
    """
    send, rank = _sender(), dist.get_rank(group)
    saved_s: list[float] = []

    def save() -> None:
        if is_interrupted:
            send(signal.SIGTERM)
        time.sleep(SAVE_S * rank)
        saved_s.append(time.monotonic())

    code = None
    with _request(lesson, Plan(), group) as stop:
        if rank == 1:
            send(signal.SIGTERM)
        if stop.agreed():
            try:
                stop.leave(save)
            except SystemExit as exit:
                code = exit.code
    return {"saved_s": saved_s, "left_s": time.monotonic(), "code": code}


def _request(lesson: Any, plan: Plan, group: Any) -> Any:
    options = {"group": group} if group else {}
    return (
        lesson.StopRequest(plan.signals, **options)
        if plan.signals
        else lesson.StopRequest(**options)
    )


def _a_handler(number: int, frame: object) -> None:
    """Do nothing: it stands for a handler of somebody else's."""


def _installed(number: int, handler: Any) -> Any:
    signal.signal(number, handler)
    return signal.getsignal(number)


def _sender() -> Callable[[int], None]:
    """Return what sends a signal to this rank."""
    if dist.get_backend() != "sim":
        return lambda number: os.kill(os.getpid(), number)
    signal.signal, signal.getsignal = _note, _noted  # type: ignore[assignment]
    return partial(_call_handler, threading.get_ident())


def _note(number: int, handler: Any) -> Any:
    before = _noted(number)
    _handlers[threading.get_ident(), number] = handler
    return before


def _noted(number: int) -> Any:
    return _handlers.get((threading.get_ident(), number), signal.SIG_DFL)


def _call_handler(thread: int, number: int) -> None:
    handler = _handlers.get((thread, number))
    if callable(handler):
        handler(number, None)
