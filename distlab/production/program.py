"""The trainer as a program: what the command line says, and how it ends."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from distlab.data import DataError
from distlab.production.config import Config, load_config, split_arguments
from distlab.production.errors import (
    EXIT_CANNOT_SAVE,
    EXIT_WRONG,
    CannotSaveError,
    ConfigError,
)
from distlab.production.lessons import Lessons, find_lessons
from distlab.production.saving import write_whole
from distlab.trainers import NotThereError

DEFAULT = Path("configs/digits_cpu.yaml")
IMPLS = ("solution", "mine")


def run_program(
    train: Callable[[Config, Lessons], None], usage: str, arguments: Sequence[str] | None = None
) -> int:
    """Read the command line, train, and return the exit code, which ``errors`` explains.

    The code is also left in ``run_dir``/exit_code: torchrun exits with 1 whatever its workers say.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & {*given}:
        print(usage)
        return 0
    run_dir: list[Path] = []
    code = 1
    try:
        config, impl = _read(given)
        run_dir.append(config.run_dir)
        train(config, find_lessons(impl, config))
        code = 0
    except (ConfigError, DataError, NotThereError) as error:
        code = _refused(error, EXIT_WRONG)
    except CannotSaveError as error:
        code = _refused(error, EXIT_CANNOT_SAVE)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    finally:
        for folder in run_dir:
            if folder.is_dir():
                write_whole(folder / "exit_code", f"{code}\n")
    return code


def _refused(error: Exception, code: int) -> int:
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)
    return code


def _read(arguments: Sequence[str]) -> tuple[Config, str]:
    given = split_arguments(arguments)
    path, impl = Path(given.pop("config", str(DEFAULT))), given.pop("impl", IMPLS[0])
    if impl not in IMPLS:
        raise ConfigError(f"--impl {impl}: use {' or '.join(IMPLS)}")
    return load_config(path, given), impl
