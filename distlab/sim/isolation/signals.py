"""Signals of ranks: each rank has its own handlers, as in a process of its own.

    signal.signal(SIGTERM, stop)            noted for the calling rank
    os.kill(os.getpid(), SIGTERM)           calls that rank's stop(), in the calling thread
    os.killpg(os.getpgrp(), SIGTERM)        does, too: a rank's process group is its own,
    os.kill(-os.getpgrp(), SIGTERM)         and this is the same

All ranks share one process, so a signal from outside reaches none of them.
"""

import errno
import os
import signal
from collections.abc import Callable
from typing import Any, Protocol

from distlab.sim.engine.clock import Clock
from distlab.sim.reporting.sites import outside
from distlab.util.text import signal_name

_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)
_HARMLESS = (signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH)
_FIRST: dict[int, Any] = {  # what Python sets at its start
    signal.SIGINT: signal.default_int_handler,
    signal.SIGPIPE: signal.SIG_IGN,
    signal.SIGXFSZ: signal.SIG_IGN,
}
_TIMED = ("alarm", "setitimer")
_kill, _killpg = os.kill, os.killpg


class Host(Protocol):
    """The parts of a world that signals use."""

    clock: Clock

    def end_process(self, cause: str) -> None:
        """End the world, because the running rank's process would end."""


class Signals:
    """The signal handlers of all ranks."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._handlers: dict[tuple[int, int], Any] = {}  # (rank, signal) -> handler

    def install(self, of_ranks: Callable[[Any, str, Callable[..., Any]], None]) -> None:
        """Replace what sets, reads and calls handlers."""
        of_ranks(signal, "signal", self._set)
        of_ranks(signal, "getsignal", self._handler)
        of_ranks(signal, "raise_signal", self._raise)
        of_ranks(os, "kill", self._send)
        of_ranks(os, "killpg", self._send_to_group)
        of_ranks(os, "abort", self._abort)
        for name in _TIMED:
            of_ranks(signal, name, self._refuse)

    def _set(self, number: int, handler: Any) -> Any:
        if self._host.clock.current.order:
            raise ValueError("signal only works in main thread of the main interpreter")
        if number in _UNCATCHABLE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if not callable(handler) and handler not in (signal.SIG_DFL, signal.SIG_IGN):
            raise TypeError(
                "signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object"
            )
        before = self._handler(number)
        self._handlers[self._rank, number] = handler
        return before

    def _handler(self, number: int) -> Any:
        if not 0 < number < signal.NSIG:
            raise ValueError("signal number out of range")
        return self._handlers.get((self._rank, number), _FIRST.get(number, signal.SIG_DFL))

    def _raise(self, number: int) -> None:
        """Do what the signal would do to the process of the calling rank."""
        handler = self._handler(number)
        if callable(handler):
            handler(int(number), outside())
        elif handler == signal.SIG_DFL and number not in _HARMLESS:
            self._host.end_process(signal_name(number))

    @property
    def _rank(self) -> int:
        return self._host.clock.current.number

    def _send(self, pid: int, number: int) -> None:
        if pid not in (0, os.getpid(), -os.getpgrp()):
            _kill(pid, number)
        elif number:
            self._raise(number)

    def _send_to_group(self, group: int, number: int) -> None:
        if group not in (0, os.getpgrp()):
            _killpg(group, number)
        elif number:
            self._raise(number)

    def _abort(self) -> None:
        self._host.end_process(signal_name(signal.SIGABRT))

    def _refuse(self, *_: object) -> None:
        raise ValueError(
            f"rank {self._rank} cannot set a timer that sends a signal: it would come to the "
            "process, which all simulated ranks share. On real processes it can"
        )
