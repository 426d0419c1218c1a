"""The messages and files between the launching process and its ranks.

Bulk data goes through files in the world's folder, so that a rank that stops in the middle of a
message blocks no reader. On the control socket, messages are single bytes, apart from the first.

    parent                     rank
    folder and number   ─────▶ reads spec.pickle
                        ◀───── STARTED   the process group is up
    GO                  ─────▶ all ranks are up: call the function
                        ◀───── REPORTED  rank-3.report is written
    RELEASE             ─────▶ all ranks have reported: close the process group and exit
"""

import contextlib
import enum
import functools
import io
import operator
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

import cloudpickle

from distlab.launch import plain
from distlab.util import files

if TYPE_CHECKING:
    from distlab.sim import Cluster, Options

STARTED, GO, REPORTED, RELEASE = b"S", b"G", b"D", b"R"
# Two signals make a rank write the stacks of all its threads to its file. The first asks the
# interpreter, which answers between two bytecodes. The second is for a rank that is stuck in C, and
# is answered immediately, by C code. In a rank that is running bytecodes, that code would sometimes
# hit a half-built frame and crash (about one in 350 dumps of an endless loop; see python/cpython
# issue 116008). Neither is SIGUSR1 or SIGUSR2, because clusters send those to training programs.
DUMP_SIGNAL = signal.SIGVTALRM
DUMP_FROM_C_SIGNAL = signal.SIGPROF
CANNOT_REPORT = 117  # exit code of a rank whose report cannot be written


class Outcome(str, enum.Enum):
    """How a rank ended, by its own account."""

    OK = "ok"
    EXCEPTION = "exception"
    SECONDARY = "secondary"  # failed only because another rank had ended or failed
    EXIT = "exit"  # called sys.exit
    OUT_OF_MEMORY = "oom"


def pickled(value: object) -> bytes:
    """Pickle a value, together with everything that its functions need from the caller's script."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle that also pickles the script's ``lru_cache`` functions, with empty caches."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, functools._lru_cache_wrapper) and not _can_be_imported(obj):
            return _with_cache, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def _can_be_imported(function: Any) -> bool:
    module = sys.modules.get(function.__module__)
    if module is None or function.__module__ == "__main__":
        return False
    try:
        return operator.attrgetter(function.__qualname__)(module) is function
    except AttributeError:  # the function is defined inside another one
        return False


def _with_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> object:
    return functools.lru_cache(**parameters)(function)


@dataclass(frozen=True)
class SimulationSpec:
    """Additional settings in the ``Spec`` of a process that simulates a world."""

    num_ranks: int
    cluster: "Cluster | str | None"
    options: "Options | None"
    wants_trace: bool  # if False, only results are returned; a trace takes megabytes


@dataclass(frozen=True)
class Spec:
    """The settings of a world, which every rank reads when it starts."""

    world_size: int
    backend: str
    devices: tuple[str, ...]  # device of each rank, such as "cpu" or "cuda:0"
    collective_timeout_s: float | None  # None: torch.distributed's default
    payload: bytes  # (fn, args), pickled with cloudpickle
    environ: dict[str, str]
    argv: tuple[str, ...]
    working_dir: str
    sys_path: tuple[str, ...]
    given: tuple[str, ...] = ()  # folders of the caller's machinery, which tracebacks leave out
    plain_results: bool = False  # encode results with ``plain`` instead of pickling them
    simulation: SimulationSpec | None = None  # if set, world_size is 1: one process runs all ranks

    def function_and_arguments(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Unpickle the function and its arguments.

        The top-level names of the caller's script are also added to ``__main__`` here, where pickle
        looks them up when ranks send each other objects that the script defines.
        """
        fn, args = pickle.loads(self.payload)
        if getattr(fn, "__module__", None) == "__main__":
            main_module = vars(sys.modules["__main__"])
            for name, value in getattr(fn, "__globals__", {}).items():
                main_module.setdefault(name, value)
        return fn, args


@dataclass(frozen=True)
class Report:
    """A rank's own account of how it ended."""

    outcome: Outcome
    at_ns: int  # by time.monotonic_ns, a clock that all processes on a machine share
    result: bytes = b""  # the result of fn, encoded or pickled
    exception: str = ""  # name of its type, such as "ValueError"
    headline: str = ""  # such as "ValueError: boom"
    traceback: str = ""  # innermost frame last, launcher frames left out
    modules: tuple[str, ...] = ()  # slow modules that it imported, to be preloaded next time


MAX_REPORT_BYTES = 2**32  # limit for trusted programs, which may return tensors
MAX_DUMP_BYTES = 16 * 2**20  # more than enough for 1024 threads of 100 frames
WORD_BYTES = 8  # size of a rank number or thread id
MAX_TEXT = 100_000  # maximum number of characters; an honest rank sends fewer


@dataclass(frozen=True)
class WorldFolder:
    """The files in the folder of one world."""

    path: Path

    @property
    def rendezvous(self) -> Path:
        return self.path / "rendezvous"

    @property
    def running(self) -> Path:
        """File in which a simulated world records the running rank and every rank's thread id."""
        return self.path / "running"

    def write_spec(self, spec: Spec) -> None:
        (self.path / "spec.pickle").write_bytes(pickle.dumps(spec))

    def read_spec(self) -> Spec:
        spec: Spec = pickle.loads((self.path / "spec.pickle").read_bytes())
        return spec

    def write_report(self, rank: int, report: Report) -> None:
        values = {**vars(report), "outcome": report.outcome.value}
        self._report(rank).write_bytes(plain.dumps(values))

    def read_report(self, rank: int, max_bytes: int = MAX_REPORT_BYTES) -> Report:
        """Read a rank's report, safely even if its function has tampered with the file.

        Raises:
            OSError: The file is missing, not a regular file, or too large.
            NotPlainError: The content is not a report.
        """
        path = self._report(rank)
        values = plain.loads(files.read_regular(path, max_bytes, follows_links=False))
        try:
            report = Report(**values)  # type: ignore[arg-type]
            report = replace(report, outcome=Outcome(report.outcome))
        except (TypeError, ValueError) as error:
            raise plain.NotPlainError(f"no report ({error})") from None
        for field in fields(Report):
            value = getattr(report, field.name)
            if type(value) is not (get_origin(field.type) or field.type):
                kind = type(value).__name__
                raise plain.NotPlainError(f"a report whose {field.name} is of type {kind}")
        if any(type(name) is not str for name in report.modules):
            raise plain.NotPlainError("a report of modules without a name")
        headline, traceback = report.headline[:MAX_TEXT], report.traceback[:MAX_TEXT]
        return replace(report, headline=headline, traceback=traceback)

    def stacks(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.stacks"

    def read_stacks(self, rank: int) -> str:
        """Return the stacks that a rank dumped; "" if there are none or it replaced the file."""
        return self._read_if_small(self.stacks(rank)).decode(errors="replace")

    def read_running(self) -> Sequence[int]:
        """Return the running rank, then every rank's thread id; empty if the file was replaced."""
        data = self._read_if_small(self.running)
        return memoryview(data).cast("q") if data and len(data) % WORD_BYTES == 0 else ()

    def _read_if_small(self, path: Path) -> bytes:
        with contextlib.suppress(OSError):
            return files.read_regular(path, MAX_DUMP_BYTES, follows_links=False)
        return b""

    def _report(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.report"
