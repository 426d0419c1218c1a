"""Run a script on a simulated cluster as ``torchrun`` would: on every rank, as ``__main__``.

Ranks are threads of this process. Names that the script defines exist once per rank, and objects
can be pickled as in separate processes. Modules that the script imports are shared by all ranks,
including their globals. A thread that the script itself starts sees the ``__main__`` of the
``distlab`` command, not the script's.
"""

import ast
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType

from distlab.sim.hardware.cluster import Cluster
from distlab.sim.reporting.errors import SimulationError
from distlab.sim.results.simulated import Options, Simulated
from distlab.sim.simulation import simulate


def run_script(
    script: Path, arguments: Sequence[str], num_ranks: int, cluster: Cluster, options: Options
) -> Simulated[None]:
    """Run ``script`` with ``arguments`` on every rank, without a process group at the start.

    ``sys.argv``, ``sys.path`` and ``os.environ`` are as under torchrun. ``exit()`` and
    ``exit(0)`` end a rank normally. Ranks see no GPUs, even if the machine has some.

    Raises:
        SimulationError: the world failed, or the script is not valid Python.
    """
    code = _compiled(script)
    with _as_program(script, arguments) as mains:
        be_main = partial(_be_main, code, script, mains)
        return simulate(be_main, num_ranks, cluster=cluster, options=options, joined=False)


def title_of(script: Path) -> str:
    """Return the first line of the script's docstring, or the script's name if it has none."""
    docstring = ast.get_docstring(ast.parse(script.read_bytes()))
    return docstring.splitlines()[0].rstrip(".") if docstring else script.stem


class _Mains(threading.local):
    """The ``__main__`` of each thread: the command's own, unless a rank has set another one."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module


def _compiled(script: Path) -> CodeType:
    try:
        return compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        reason = "".join(traceback.format_exception_only(error)).strip()
        raise SimulationError(f"{script} cannot be run\n{reason}") from None


@contextlib.contextmanager
def _as_program(script: Path, arguments: Sequence[str]) -> Iterator[_Mains]:
    """Make the process look as if Python had been started with the script."""
    before = sys.argv, sys.path, sys.modules["__main__"], os.environ.get("CUDA_VISIBLE_DEVICES")
    mains = _Mains(before[2])
    sys.argv = [str(script), *arguments]
    sys.path = [str(script.resolve().parent), *sys.path]
    sys.modules["__main__"] = _dispatcher(mains)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # hides real GPUs: simulated ones compute on the CPU
    try:
        yield mains
    finally:
        sys.argv, sys.path, sys.modules["__main__"], devices = before
        if devices is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices


def _dispatcher(mains: _Mains) -> ModuleType:
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


def _be_main(code: CodeType, script: Path, mains: _Mains) -> None:
    """Run the script's code in a new ``__main__``."""
    mains.module = ModuleType("__main__")
    mains.module.__file__ = str(script.resolve())
    try:
        _run_program(code, mains.module.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
