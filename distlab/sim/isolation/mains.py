"""A script's ``__main__``: one per rank, as in separate processes."""

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

import torch

from distlab.sim.gpu.host import VISIBLE
from distlab.torchvision_repair import repairing
from distlab.util.replacing import replace_until


class Mains(threading.local):
    """The ``__main__`` of each thread: the command's own, unless the thread has set another one."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module


@dataclass(frozen=True)
class Program:
    """A script, while this process looks as if Python had been started with it."""

    script: Path
    code: CodeType
    mains: Mains

    def run(self) -> None:
        """Run the script's code in a new ``__main__`` of the calling thread.

        Raises:
            SystemExit: the script left with a status other than success.
        """
        with allowed_to_exit():
            _run_program(self.code, self._new_main("__main__"))

    def load(self, *, is_silent: bool) -> dict[str, object]:
        """Run the script's code as in a process that it has started, and return its variables.

        Args:
            is_silent: True if the lines that the code prints are to be dropped.
        """
        names = self._new_main("__mp_main__")
        with contextlib.redirect_stdout(io.StringIO() if is_silent else sys.stdout):
            exec(self.code, names)
        return names

    def _new_main(self, name: str) -> dict[str, object]:
        """Give the calling thread a new ``__main__``, and return its variables."""
        self.mains.module = ModuleType(name)
        self.mains.module.__file__ = str(self.script.resolve())
        return self.mains.module.__dict__


@contextlib.contextmanager
def allowed_to_exit() -> Iterator[None]:
    """Let ``exit()`` and ``exit(0)`` end the block normally."""
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


@contextlib.contextmanager
def as_program(script: Path, code: CodeType, arguments: Sequence[str]) -> Iterator[Program]:
    """Make the process look as if Python had been started with the script."""
    names = ("__main__", "__mp_main__")  # the second is that of multiprocessing's children
    before = sys.argv, sys.path
    modules = {name: sys.modules[name] for name in names if name in sys.modules}
    mains = Mains(sys.modules["__main__"])
    sys.argv = [str(script), *arguments]
    sys.path = [str(script.resolve().parent), *sys.path]
    sys.modules.update(dict.fromkeys(names, _dispatcher(mains)))
    try:
        with _gpus_hidden(), repairing():
            yield Program(script, code, mains)
    finally:
        sys.argv, sys.path = before
        del sys.modules["__mp_main__"]
        sys.modules.update(modules)


@contextlib.contextmanager
def _gpus_hidden() -> Iterator[None]:
    """Hide the machine's GPUs from CUDA, as simulated ones compute on the CPU.

    The program sees the variable as it was, since the simulated GPUs are all there.
    """
    os.putenv(VISIBLE, "")  # unlike os.environ, which the program reads
    with contextlib.ExitStack() as undo:
        undo.callback(_reset, VISIBLE)
        replace_until(undo, torch.cuda, "_device_count_nvml", lambda: -1)  # torch asks CUDA, then
        yield


def _reset(name: str) -> None:
    """Let what this process starts see a variable as Python does."""
    if name in os.environ:
        os.putenv(name, os.environ[name])
    else:
        os.unsetenv(name)


def _dispatcher(mains: Mains) -> ModuleType:
    """Return a module that forwards to the calling thread's ``__main__``, so that pickle works."""

    class Main(ModuleType):
        def __getattribute__(self, name: str) -> object:
            return getattr(mains.module, name)

        def __setattr__(self, name: str, value: object) -> None:
            setattr(mains.module, name, value)

    return Main("__main__")


def _run_program(code: CodeType, names: dict[str, object]) -> None:
    """Run only the script's code, so that ``isolation.exits`` can recognise its frame."""
    exec(code, names)
