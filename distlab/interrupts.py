"""Ctrl-C while modules are still being imported: nothing to clean up, and no traceback to show."""

import signal
import threading


def end_at_once() -> None:
    """Let ctrl-C end this process as it does any program that knows nothing of it."""
    if _is(signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_again() -> None:
    """Let ctrl-C raise KeyboardInterrupt again, after ``end_at_once``; nohup's choice stays."""
    if _is(signal.SIG_DFL):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore() -> None:
    """Let nothing come of ctrl-C: the process is about to end."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _is(handler: object) -> bool:
    """Whether this is what ctrl-C does, and may be changed: by the main thread alone."""
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGINT) == handler
