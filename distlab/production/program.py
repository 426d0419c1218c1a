"""The trainer as a program: its command line and its exit codes."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from distlab import lessons
from distlab.chosen import CHOICES, NotThereError
from distlab.data import DataError
from distlab.grade.outcomes import LessonError
from distlab.production import errors
from distlab.production.config import Config, load_config, split_arguments
from distlab.production.errors import ConfigError
from distlab.production.lessons import Lessons, find_lessons
from distlab.production.saving import leave_code
from distlab.production.watch import end_process
from distlab.production.world import leave
from distlab.util import tracebacks

DEFAULT = lessons.COURSE / "configs/digits_cnn.yaml"
CRASHED = 1
SAVE_S = 60.0  # longest wait of a crashed rank for the checkpoint that it is writing
INTERRUPTED = "interrupted before the first step or after the last: start the same command again"


def run_program(
    train: Callable[[Config, Lessons], None], usage: str, arguments: Sequence[str] | None = None
) -> int:
    """Read the command line, train, and return the exit code; ``errors`` lists the codes.

    The code is also written to ``run_dir``/exit_code, because torchrun exits with 1 whatever its
    workers return.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & {*given}:
        print(usage)
        return 0
    try:
        config, impl = _read(given)
    except ConfigError as error:
        for run_dir in _named_run_dirs(given):  # the launcher must not retry after a wrong key
            leave_code(run_dir, errors.EXIT_WRONG)
        return _refused(str(error), errors.EXIT_WRONG)
    code = _trained(lambda: train(config, find_lessons(impl, config)))
    leave_code(config.run_dir, code)
    if code:
        _leave(code)
    return code


def _leave(code: int) -> None:
    """Leave the process group; end a launched process here if it has crashed or cannot leave."""
    has_crashed = code == CRASHED
    has_left = leave(has_crashed=has_crashed)
    if "RANK" in os.environ and (has_crashed or not has_left):
        _finish_save()
        end_process(code)


def _finish_save() -> None:
    """Wait up to ``SAVE_S`` for threads that are no daemons: one may be writing a checkpoint."""
    end_s = time.monotonic() + SAVE_S
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join(max(end_s - time.monotonic(), 0.0))


def _trained(train: Callable[[], None]) -> int:
    """Train, and return the exit code; an error is printed at once, before anything can hang."""
    try:
        code, reason = ended(train)
        return _refused(reason, code) if reason else code
    except KeyboardInterrupt:
        return _refused(INTERRUPTED, errors.EXIT_STOPPED)
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else CRASHED
    except BaseException as error:
        who = f"rank {os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')}"
        text = f"{who} raised {tracebacks.headline(error)}\n\n{traceback.format_exc()}"
        print(text, file=sys.stderr, flush=True)
        return CRASHED


def ended(train: Callable[[], None]) -> tuple[int, str]:
    """Train, and return the exit code, with the reason if a user can do something about it."""
    try:
        train()
    except (ConfigError, DataError, LessonError, NotThereError) as error:
        return errors.EXIT_WRONG, str(error)
    except errors.InUseError as error:
        return errors.EXIT_IN_USE, str(error)
    except errors.CannotSaveError as error:
        return errors.EXIT_CANNOT_SAVE, str(error)
    return 0, ""


def _named_run_dirs(arguments: Sequence[str]) -> list[Path]:
    """Return the run directories on the command line, in case the configuration is unreadable."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    return [Path(value) for key, value in pairwise(words) if key == "--run_dir"]


def _refused(reason: str, code: int) -> int:
    prefix = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    for line in reason.splitlines():
        print(f"{prefix}error: {line}", file=sys.stderr, flush=True)
    return code


def _read(arguments: Sequence[str]) -> tuple[Config, str]:
    given = split_arguments(arguments)
    impl = impl_of(given)
    return config_of(given), impl


def config_of(given: Mapping[str, str]) -> Config:
    """Read the configuration that a command line names.

    Raises:
        ConfigError: The configuration is wrong.
    """
    keys = {key: value for key, value in given.items() if key not in ("config", "impl")}
    return load_config(Path(given.get("config", str(DEFAULT))), keys)


def impl_of(given: Mapping[str, str]) -> str:
    """Return which lessons a command line chooses, "solution" or "mine".

    Raises:
        ConfigError: The choice is neither solution nor mine.
    """
    impl = given.get("impl", CHOICES[0])
    if impl not in CHOICES:
        raise ConfigError(f"--impl {impl}: use {' or '.join(CHOICES)}")
    return impl
