"""Processes that a script starts as its ranks: noted here, and simulated when the script waits.

the script                      here
start_processes / start()  ──►  a Child is noted
join(), exitcode, get()    ──►  the noted children become the ranks of one simulated world
"""

import contextlib
import inspect
import io
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.process
import multiprocessing.queues
import multiprocessing.synchronize
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.multiprocessing
from torch import Tensor, nn

from distlab.sim.isolation.mains import Program, allowed_to_exit
from distlab.sim.isolation.modules import is_of_program
from distlab.sim.reporting.errors import SimulationError
from distlab.util.replacing import Replace, replace_until

_KINDS = ("ForkProcess", "SpawnProcess", "ForkServerProcess")
_WAITS: tuple[tuple[type, str], ...] = (
    (multiprocessing.queues.Queue, "get"),
    (multiprocessing.queues.SimpleQueue, "get"),
    (multiprocessing.queues.JoinableQueue, "join"),
    (multiprocessing.synchronize.Condition, "wait"),
    (multiprocessing.synchronize.Event, "wait"),
    (multiprocessing.connection._ConnectionBase, "recv"),
    (multiprocessing.connection._ConnectionBase, "poll"),
)


class Child(NamedTuple):
    """A process of the script.

    Attributes:
        call: Its function and arguments, pickled if possible, so that each rank has its own.
        shared: Objects that the processes share; an index is pickled instead.
        is_fork: True if it was started by fork, so that it has all variables of the script.
        variables: The environment when it was started.
    """

    call: Any
    shared: list[object]
    is_fork: bool
    variables: dict[str, str]


class Children:
    """The processes that the script has started and not waited for yet.

    Args:
        simulate: Function that runs children as ranks; returns when all of them have ended.
    """

    def __init__(self, simulate: Callable[[list[Child]], object]) -> None:
        self._simulate = simulate
        self._pending: list[Child] = []
        self._started: list[Any] = []  # the processes for which there are children
        self._parent = os.getpid()
        self._is_running = False

    def add(self, call: Callable[[], object], *, is_fork: bool) -> None:
        """Note a child that calls ``call``."""
        self._pending.append(_packed(call, is_fork))

    @property
    def num_started(self) -> int:
        """Number of processes that have been started so far."""
        return len(self._started)

    def forget(self) -> None:
        """Drop the noted children, for which Python would otherwise wait at its exit."""
        self._pending.clear()
        for process in self._started:
            multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]

    def run(self) -> None:
        """Simulate the noted children; the ranks themselves may call this, without effect."""
        if not self._pending or self._is_running or os.getpid() != self._parent:
            return
        children, self._pending = self._pending, []
        self._is_running = True
        try:
            self._simulate(children)
        finally:
            self._is_running = False

    def install(self, replace: Replace) -> None:
        """Note the processes that the script starts from now on, instead of starting them."""
        spawning = sys.modules["torch.multiprocessing.spawn"]  # the package's name is its function
        replace(spawning, "start_processes", self._start_processes)
        replace(torch.multiprocessing, "start_processes", self._start_processes)
        for name in _KINDS:
            kind = getattr(multiprocessing.context, name)
            start = kind._Popen
            replace(kind, "_Popen", staticmethod(partial(self._start, start, name)))
        replace(multiprocessing.process, "_cleanup", lambda: None)  # would wait at every start
        for owner, name in _WAITS:
            wait = getattr(owner, name)
            replace(owner, name, _after(self.run, wait))

    def _start_processes(
        self,
        fn: Callable[..., object],
        args: tuple[object, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> "Spawned | None":
        """Stand in for the function of the same name in torch, to which its ``spawn`` leads."""
        for number in range(nprocs):
            self.add(partial(fn, number, *args), is_fork=start_method == "fork")
        spawned = Spawned(self)
        return None if join and spawned.join() else spawned

    def _start(self, start: Callable[[Any], object], kind: str, process: Any) -> object:
        """Note a process of the script; start one that a library needs, such as a data loader."""
        is_own_class = type(process).run is not multiprocessing.process.BaseProcess.run
        function = process.run if is_own_class else process._target
        if self._is_running or not is_of_program(_file_of(function)):
            return start(process)
        is_fork = kind == "ForkProcess"
        call = function if is_own_class else partial(function, *process._args, **process._kwargs)
        self.add(call, is_fork=is_fork)
        self._started.append(process)
        return Started(self)


class Spawned:
    """Stands in for torch's context of spawned processes."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self.processes: list[object] = []

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Simulate the children, and return True: all have ended."""
        self._children.run()
        return True


class Started:
    """Stands in for the handle of an operating system's process, through which Python waits."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self.pid, self.sentinel = os.getpid(), -1
        self.returncode: int | None = None
        self._num_started_at_poll = 0

    def poll(self, flag: int = 0) -> int | None:
        """Return None for a running process; simulate it if the script only waits for it by now."""
        if self.returncode is None and self._num_started_at_poll < self._children.num_started:
            self._num_started_at_poll = self._children.num_started
            return None
        return self.wait()

    def wait(self, timeout: float | None = None) -> int | None:
        """Simulate the children, and return the exit status, 0."""
        self._children.run()
        self.returncode = 0
        return self.returncode

    def terminate(self) -> None:
        """Do nothing: the process has ended, or never begins."""

    kill = close = terminate


def be_child(child: Child, program: Program, parent: ModuleType) -> None:
    """Run a child in the calling thread, which is a rank's.

    Args:
        child: The child.
        program: The script, whose code runs once more here, as in a spawned process.
        parent: The script's ``__main__`` in its first process.
    """
    if not isinstance(child.call, bytes):  # belongs to the script's first process, as all it uses
        program.mains.module = parent
        with allowed_to_exit():
            _run_child(child.call)
        return
    of_child = program.load(is_silent=child.is_fork)
    if child.is_fork:
        for name, value in vars(parent).items():
            is_dunder = name.startswith("__")
            if not is_dunder and (name not in of_child or not _is_definition(value)):
                of_child[name] = _unpacked(_packed(value, is_fork=True))
    with allowed_to_exit():
        _run_child(_unpacked(child))


def _run_child(call: Callable[[], object]) -> None:
    """Call only the child's function, so that ``isolation.exits`` can recognise its frame."""
    call()


def _is_definition(value: object) -> bool:
    """Return whether a variable of a script is a function, class or module, not data."""
    return isinstance(value, type) or hasattr(value, "__code__") or hasattr(value, "__spec__")


def _file_of(function: Any) -> str:
    """Return the file of a function, or that of a callable object's class."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return str(code.co_filename) if code else "<unknown>"


def _after(run: Callable[[], None], wait: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``wait``, preceded by a call of ``run``."""

    def run_and_wait(*args: Any, **kwargs: Any) -> Any:
        run()
        return wait(*args, **kwargs)

    return run_and_wait


# Arguments are pickled, so that each rank gets its own copies, and functions by name, so that each
# rank runs its own script's. Queues and locks are shared, and so is the memory of tensors, unless a
# fork copies it.


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: list[object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_id(self, value: object) -> int | None:
        """Return the number of a shared object, or None for any other."""
        is_shared = type(value).__module__.startswith("multiprocessing.")
        if not is_shared and not isinstance(value, Tensor):
            return None
        self._shared.append(value)
        return len(self._shared) - 1

    def reducer_override(self, value: Any) -> Any:
        """Pickle a process of the script's own class by its attributes."""
        if not isinstance(value, multiprocessing.process.BaseProcess):
            return NotImplemented
        return object.__new__, (type(value),), {**vars(value), "_config": {}}


class _Unpickler(pickle.Unpickler):
    def __init__(self, child: Child, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))
        self._shared, self._is_fork = child.shared, child.is_fork

    def persistent_load(self, number: int) -> object:
        """Return the shared object of that number, or a tensor of this rank's over its memory."""
        value = self._shared[number]
        if not isinstance(value, Tensor):
            return value
        values = value.detach()
        if self._is_fork and not value.untyped_storage().is_shared():
            values = values.clone()
        if isinstance(value, nn.Parameter):
            return nn.Parameter(values, value.requires_grad)
        return values.requires_grad_(value.requires_grad)


def _packed(call: Any, is_fork: bool) -> Child:
    file, shared = io.BytesIO(), list[object]()
    try:
        _Pickler(file, shared).dump(call)
    except Exception:  # an object's __reduce__ may raise anything
        if not is_fork:
            raise  # as on real processes
        return Child(call, [], is_fork, {**os.environ})
    return Child(file.getvalue(), shared, is_fork, {**os.environ})


def _unpacked(child: Child) -> Any:
    is_pickled = isinstance(child.call, bytes)
    return _Unpickler(child, child.call).load() if is_pickled else child.call


@contextlib.contextmanager
def noted(children: Children) -> Iterator[None]:
    """Note the processes that the script starts in this block, and simulate them at its end."""
    context: Any = multiprocessing.context._default_context
    with contextlib.ExitStack() as undo:
        undo.callback(setattr, context, "_actual_context", context._actual_context)
        replace = partial(replace_until, undo)
        children.install(replace)
        for owner in (dist, c10d):
            replace(owner, "init_process_group", _refuse_to_join)
        try:
            yield
            children.run()
        finally:
            children.forget()


def _refuse_to_join(*_: object, **__: object) -> None:
    raise SimulationError(
        "the script's first process joins a group itself: only the processes that it starts are "
        "simulated, so start one for each rank"
    )
