"""The command's entry point, which ensures reliable exit codes and one-line errors.

ctrl-C is handled from the start, even while typer and torch are being imported.
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from distlab.cli.streams import INTERRUPTED, complain, drop, print_line
from distlab.util import processes

FAILED, USAGE, PIPE_CLOSED = 1, 2, 141
OF_OPTIONS = ("ConfigError", "SetupError")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    The exit code is 0 for success, 1 for failure, 2 for bad options, 130 for ctrl-C, and 141 if the
    output is no longer read; the commands that grade have their own codes.
    """
    seen: list[int] = []  # one entry for each ctrl-C
    atexit.register(_end, seen)  # registered first, so it runs last
    _open_closed_streams()
    with _interrupts(seen):
        try:
            from distlab.cli import app

            code = app.run(arguments)
            sys.stdout.flush()
        except BaseException as error:  # an import may turn ctrl-C into another error
            code = complain("interrupted", INTERRUPTED) if seen else _code_of(error, arguments)
    if code != INTERRUPTED:
        seen.clear()  # the command has handled any ctrl-C
    sys.exit(code)


def _code_of(error: BaseException, arguments: Sequence[str] | None) -> int:
    """Print what went wrong and return the exit code; for a bug, re-raise the error."""
    # click may have turned a BrokenPipeError into a SystemExit(1).
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        drop(sys.stdout.fileno())
        return PIPE_CLOSED
    if isinstance(error, KeyboardInterrupt):
        return complain("interrupted", INTERRUPTED)
    if type(error).__module__.startswith("distlab."):
        where = f"{_command(arguments)}: " if type(error).__name__ in OF_OPTIONS else ""
        return complain(f"{where}{error}", USAGE if _is_about_options(error) else FAILED)
    if isinstance(error, OSError):
        drop(sys.stdout.fileno())  # the disk that stdout writes to may be full
        place = error.filename or "standard output"
        print_line(f"distlab: {place}: {error.strerror or error}")
        return FAILED
    raise error


def _command(arguments: Sequence[str] | None) -> str:
    """Return the command whose options were wrong, such as ``distlab train``."""
    given = sys.argv[1:] if arguments is None else arguments
    return " ".join(["distlab", *(name for name in given[:1] if not name.startswith("-"))])


def _is_about_options(error: BaseException) -> bool:
    """Return True if the command would probably have succeeded with other options."""
    from distlab.course import CourseError
    from distlab.learner.folder import LearnerError, WriteError

    if isinstance(error, CourseError | LearnerError):
        return not isinstance(error, WriteError)
    from distlab.launch import SetupError  # distlab raised the error, so torch is already loaded
    from distlab.production.errors import ConfigError

    return isinstance(error, ConfigError | SetupError)


# Signals and streams


@contextmanager
def _interrupts(seen: list[int]) -> Iterator[None]:
    """Record each ctrl-C that is pressed inside the block, and raise KeyboardInterrupt as usual."""

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        seen.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # nohup or the caller has set its own
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(seen: Sequence[int]) -> None:
    """Ignore ctrl-C while the process ends; if it was pressed earlier, exit with INTERRUPTED.

    Without this, Python would end itself with SIGINT after a ctrl-C inside ``exec``.
    """
    processes.ignore_ctrl_c()
    gc.freeze()  # saves 0.4 s, because the final garbage collection then skips torch's objects
    if seen:
        os._exit(INTERRUPTED)


def _open_closed_streams() -> None:
    """Connect closed standard streams to /dev/null, so that no other file gets their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # opens the lowest free descriptor, which is this one
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: SIM115
