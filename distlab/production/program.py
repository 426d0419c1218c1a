"""The trainer as a program: its command line and its exit codes."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from distlab.chosen import NotThereError
from distlab.data import DataError
from distlab.production import errors
from distlab.production.config import Config, load_config, split_arguments
from distlab.production.errors import ConfigError
from distlab.production.lessons import Lessons, find_lessons
from distlab.production.saving import leave_code

DEFAULT = Path("configs/digits_cpu.yaml")
IMPLS = ("solution", "mine")
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
        return _refused(error, errors.EXIT_WRONG)
    code = 1
    try:
        train(config, find_lessons(impl, config))
        code = 0
    except (ConfigError, DataError, NotThereError) as error:
        code = _refused(error, errors.EXIT_WRONG)
    except errors.CannotSaveError as error:
        code = _refused(error, errors.EXIT_CANNOT_SAVE)
    except KeyboardInterrupt:
        code = _refused(InterruptedError(INTERRUPTED), errors.EXIT_STOPPED)
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    finally:
        leave_code(config.run_dir, code)
    return code


def _named_run_dirs(arguments: Sequence[str]) -> list[Path]:
    """Return the run directories on the command line, in case the configuration is unreadable."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    return [Path(value) for key, value in pairwise(words) if key == "--run_dir"]


def _refused(error: Exception, code: int) -> int:
    prefix = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    for line in str(error).splitlines():
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
    impl = given.get("impl", IMPLS[0])
    if impl not in IMPLS:
        raise ConfigError(f"--impl {impl}: use {' or '.join(IMPLS)}")
    return impl
