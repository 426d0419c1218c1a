"""Patches to torch and Python that are in place while a simulated world runs.

torch keeps one table of process groups per process and has no public way to keep one per rank. The
attributes changed here are those that torch's own thread-based tests use. They are private, so any
other version of torch needs testing first (constraints.txt names the tested one).
"""

import contextlib
import functools
import os
import platform
import random
import re
import socket
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.nn.functional  # binds group.WORLD, so never import it inside a rank
import torch.distributed.rpc
import torch.multiprocessing
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp._debug_utils import SimpleProfiler
from torch.distributed.tensor import _random as sharded_random
from torch.distributed.tensor import _redistribute as redistribution

from distlab.process_group.joining import keeping_work
from distlab.sim.engine.clock import Clock
from distlab.sim.engine.scheduler import Scheduler
from distlab.sim.gpu.cuda import index_from
from distlab.sim.gpu.group import Fleet
from distlab.sim.isolation.compiling import Compiler
from distlab.sim.isolation.exits import Exits
from distlab.sim.isolation.groups import BACKEND, Groups
from distlab.sim.isolation.profiler import SharedProfiler
from distlab.sim.isolation.rank_states import (
    NUMPY_FUNCTIONS,
    PYTHON_FUNCTIONS,
    RankStates,
    set_warning_state,
    warning_state,
)
from distlab.sim.isolation.refusals import Refusals
from distlab.sim.isolation.signals import Signals
from distlab.sim.isolation.threads import Threads
from distlab.sim.messages.mailbox import Mailbox
from distlab.sim.messages.work import Handles
from distlab.sim.reporting.errors import SimulationError
from distlab.sim.reporting.sites import Places
from distlab.util.replacing import Replace, replace_until
from distlab.util.text import rank_names

OfRanks = Callable[[Any, str, Callable[..., Any]], None]  # (owner, name, function for ranks)


class RankHost(Protocol):
    """The parts of a world that the patches to torch and Python use."""

    scheduler: Scheduler
    clock: Clock
    rank_states: RankStates
    groups: Groups
    refusals: Refusals
    profiler: SharedProfiler
    handles: Handles
    threads: Threads
    exits: Exits
    mailbox: Mailbox
    fleet: Fleet | None
    places: Places

    def end_process(self, cause: str) -> None:
        """End the world, because the running rank's process would end at once."""


_occupied = threading.Lock()  # held while this process hosts simulated ranks


@contextlib.contextmanager
def installed(host: RankHost) -> Iterator[None]:
    """Make this process host simulated ranks inside the block.

    Raises:
        SimulationError: the process already hosts another world.
    """
    if not _occupied.acquire(blocking=False):
        raise SimulationError("a process can simulate only one world at a time")
    with contextlib.ExitStack() as undo:
        undo.callback(_occupied.release)
        _restore_afterwards(undo)
        undo.callback(host.rank_states.leave, os.environ._data)  # type: ignore[attr-defined]
        replace_until(undo, c10d, "_world", host.rank_states.tables)
        # Give each thread its own named groups. torch's stubs lack this function.
        isolate: Any = torch._C._distributed_c10d
        isolate._set_thread_isolation_mode(True)
        undo.callback(isolate._set_thread_isolation_mode, False)
        _register_backend(host)
        undo.callback(_current.clear)
        _patch_groups(undo, host)
        _patch_making_of_groups(undo, host)
        _patch_default_group(undo, host)
        _patch_checks(undo, host)
        replace = functools.partial(replace_until, undo)
        host.refusals.install(replace)
        host.groups.own_stores.install(replace)
        of_ranks = functools.partial(_replace_on_ranks, undo, host.rank_states)
        _patch_clocks(of_ranks, host)
        _patch_timeit(undo, of_ranks, host.clock.read)
        host.threads.install(replace)
        host.profiler.install(replace)
        _patch_swapping(replace)
        replace(Join, "notify_join_context", staticmethod(keeping_work(Join.notify_join_context)))
        _patch_redistribution(replace, host.rank_states)
        _patch_process(of_ranks, host)
        _patch_host(of_ranks, host.rank_states)
        if host.fleet is None:
            _patch_gpus(of_ranks, host.rank_states)
        else:
            _patch_backends(replace)
        _patch_rpc(of_ranks, host.rank_states)
        _patch_spawning(of_ranks, host)
        _patch_generators(of_ranks, host.rank_states)
        of_ranks(torch, "compile", Compiler(host.places))
        # FSDP's own profiler keeps the parts that it times in one set for the process.
        of_ranks(SimpleProfiler, "profile", lambda _part: contextlib.nullcontext())
        torch.meta = MetaHandle(undo)  # type: ignore[attr-defined]
        undo.callback(delattr, torch, "meta")
        yield


def _restore_afterwards(undo: contextlib.ExitStack) -> None:
    """Make ``undo`` restore the process settings that ranks may change."""
    undo.callback(setattr, sys, "excepthook", sys.excepthook)  # init_process_group replaces it
    # Redirections on several ranks may overlap, and so leave these streams changed.
    undo.callback(setattr, sys, "stdout", sys.stdout)
    undo.callback(setattr, sys, "stderr", sys.stderr)
    undo.callback(setattr, sys, "argv", sys.argv)
    undo.callback(set_warning_state, warning_state())
    undo.callback(torch.default_generator.set_state, torch.default_generator.get_state())
    undo.callback(torch.set_default_dtype, torch.get_default_dtype())
    undo.callback(setattr, sharded_random, "_rng_tracker", sharded_random._rng_tracker)
    undo.callback(_set_deterministic, torch.are_deterministic_algorithms_enabled())
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(1)  # otherwise each rank gets its own thread pool


def _set_deterministic(wanted: bool) -> None:
    """Restore the setting only if a rank changed it: setting it loads torch's compiler (1 s)."""
    if torch.are_deterministic_algorithms_enabled() != wanted:
        torch.use_deterministic_algorithms(wanted)


def _replace_on_ranks(
    undo: contextlib.ExitStack,
    rank_states: RankStates,
    owner: Any,
    name: str,
    of_rank: Callable[..., Any],
) -> None:
    """Replace a function for rank threads; all other threads keep the original."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (of_rank if rank_states.is_in_rank() else real)(*args, **kwargs)

    replace_until(undo, owner, name, choose)


def _register_backend(host: RankHost) -> None:
    """Register the backend with which ``new_group`` and ``DeviceMesh`` make simulated groups."""
    _current["host"] = host
    if BACKEND.upper() not in vars(dist.Backend):
        dist.Backend.register_backend(
            BACKEND, _create_group, extended_api=True, devices=["cpu", "cuda", "meta"]
        )


_current: dict[str, Any] = {}  # current host; global because the backend is registered only once


def _be_no_rank() -> None:
    """Switch to real time in a process that a rank has forked, such as a data loader's worker."""
    host: RankHost | None = _current.get("host")
    if host is not None and _occupied.locked():
        host.rank_states.forget()


os.register_at_fork(after_in_child=_be_no_rank)


def unwaited() -> list[str]:
    """Return a line for each handle that the calling rank has not waited for.

    A handle counts as waited for once ``wait()`` has been called or ``is_completed()`` has returned
    True; a barrier is not enough. Outside a simulated rank, the list is empty.
    """
    host: RankHost | None = _current.get("host")
    if host is None or not _occupied.locked() or not host.rank_states.is_in_rank():
        return []
    rows = host.handles.rows([host.rank_states.current])
    return [f"{rank_names(row.ranks)}  {row.text}  {row.where}" for row in rows]


def _create_group(options: Any, description: str | None) -> dist.ProcessGroup:
    host: RankHost = _current["host"]
    members = tuple(options.global_ranks_in_group)
    return host.groups.make(members, options.group_id, options.timeout, description or "")


# Finds rank, number of ranks and address; the package's attribute of this name is a function.
_RENDEZVOUS: Any = sys.modules["torch.distributed.rendezvous"]


def _patch_groups(undo: contextlib.ExitStack, host: RankHost) -> None:
    """Make every group a simulated one, whichever backend the program asks for."""
    simulated = {
        "init_process_group": _joining(undo, host),
        "new_group": _making(host),
        "monitored_barrier": _monitored_barrier,  # torch's own needs gloo
    }
    for owner in (dist, c10d):
        for name, function in simulated.items():
            replace_until(undo, owner, name, function)


def _joining(undo: contextlib.ExitStack, host: RankHost) -> Callable[..., None]:
    """Return ``init_process_group`` for simulated ranks."""

    def init_process_group(
        backend: object = None,
        init_method: object = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: object = None,
        *_: Any,
        **settings: Any,
    ) -> None:
        if host.rank_states.is_in_rank() and dist.is_initialized():
            raise ValueError(
                "trying to initialize the default process group twice! "
                "The rank is in it already: leave this call out"
            )
        _check_place(host.rank_states, rank, world_size)
        if store is None:
            next(_rendezvous(host, init_method or "env://", rank, world_size))
            host.groups.check_port(_port_of(init_method))
        elif min(rank, world_size) < 0:
            raise AssertionError("rank and world_size must be given with a store")
        host.exits.joined(host.rank_states.current)
        asked = _asked(host, backend, {**settings, "timeout": timeout})
        host.groups.join(timeout, **asked)
        _share_loss_handlers(undo)

    return init_process_group


def _making(host: RankHost) -> Callable[..., Any]:
    """Return ``new_group`` for simulated ranks."""
    new_group = c10d.new_group

    def new_simulated_group(*args: Any, **kwargs: Any) -> Any:
        settings = {**dict(zip(_OF_NEW_GROUP, args, strict=False)), **kwargs}
        if host.fleet is not None:
            asked = _asked(host, settings.get("backend"), settings)
            host.groups.asked[host.rank_states.current] = asked
            settings.pop("device_id", None)
        return new_group(**{**settings, "backend": None})

    return new_simulated_group


def _monitored_barrier(
    group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
) -> None:
    if group != dist.GroupMember.NON_GROUP_MEMBER:
        members: Any = c10d._group_or_default_group(group)
        members.monitored_barrier(timeout, wait_all_ranks)


_OF_NEW_GROUP = (
    *("ranks", "timeout", "backend", "pg_options"),
    *("use_local_synchronization", "group_desc", "device_id", "sort_ranks"),
)


def _asked(host: RankHost, backend: object, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that depend on what the program asked for."""
    if host.fleet is None:
        return {}
    device_id = settings.get("device_id")
    name, default_group = str(backend or "").lower(), host.rank_states.tables.default_pg
    bound = -1 if device_id is None else index_from(device_id)
    if default_group is not None:  # a new group takes over what it is not given
        name = name or default_group.backend
        bound = default_group.bound if device_id is None else bound
    if ":" in name or name == "undefined":
        name = ""
    kept = {"options": settings.get("pg_options"), "watchdog": settings.get("timeout")}
    return {"backend": name, "bound": bound, **kept}


def _patch_backends(replace: Replace) -> None:
    """Let ``get_backend…`` and ``barrier`` see the backend and the GPU that the program asked for.

    torch would find the GPU as the group's ``bound_device_id``, but then it splits groups, too.
    """
    barrier = dist.barrier

    def get_backend(group: Any = None) -> dist.Backend:
        members: Any = c10d._group_or_default_group(group)
        return dist.Backend(members.backend or "undefined")

    def get_backend_config(group: Any = None) -> str:
        known = {"gloo": "cpu:gloo,cuda:gloo", "nccl": "cuda:nccl"}
        return known.get(get_backend(group), "cpu:gloo,cuda:nccl")

    @functools.wraps(barrier)
    def on_bound_gpu(
        group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None
    ) -> Any:
        bound = getattr(c10d._group_or_default_group(group), "bound", -1)
        if device_ids is None and bound >= 0:
            device_ids = [bound]
        return barrier(group, async_op, device_ids, timeout)

    for owner in (dist, c10d):
        replace(owner, "get_backend", get_backend)
        replace(owner, "get_backend_config", get_backend_config)
        replace(owner, "barrier", on_bound_gpu)


def _port_of(url: object) -> str:
    """Return the port at which ranks meet: the URL's or, if it has none, MASTER_PORT."""
    found = re.fullmatch(r"tcp://[^/]*:(\d+).*", str(url or ""))
    return found[1] if found else os.environ.get("MASTER_PORT", "")


def _check_place(rank_states: RankStates, rank: int, world_size: int) -> None:
    """Raise unless the caller is a rank, and gives its own number and that of all ranks, or -1."""
    if not rank_states.is_in_rank():
        raise RuntimeError(
            f"a process that rank {rank_states.current} has started cannot join the simulated "
            "ranks. A script that starts its own ranks does so under its own "
            'if __name__ == "__main__", and reads no RANK or LOCAL_RANK from the environment'
        )
    mine, everyone = rank_states.current, rank_states.num_ranks
    if rank not in (-1, mine) or world_size not in (-1, everyone):
        raise ValueError(
            f"rank {mine} of {everyone} calls init_process_group(rank={rank}, "
            f"world_size={world_size}): expected rank={mine} and world_size={everyone}, as in RANK "
            "and WORLD_SIZE. Leave both out, and init_process_group reads them itself"
        )


# Patches inside torch, which take effect even if a program imported the public functions earlier


def _rendezvous(
    host: RankHost, url: object, rank: int = -1, world_size: int = -1, **settings: Any
) -> Iterator[tuple[object, int, int]]:
    """Yield what torch's yields, or raise its error where numbers or an address are missing."""
    _, rank, world_size = next(_RENDEZVOUS.rendezvous(url, rank, world_size, **settings))
    _check_place(host.rank_states, rank, world_size)
    yield host.groups.store, rank, world_size


def _patch_making_of_groups(undo: contextlib.ExitStack, host: RankHost) -> None:
    """Make torch's own ``init_process_group`` and ``new_group`` create simulated groups."""
    make_group = c10d._new_process_group_helper

    def make_simulated_group(
        size: int, rank: int, ranks: list[int], backend: str, *rest: Any, **settings: Any
    ) -> Any:
        if not ranks:
            host.exits.joined(host.rank_states.current)
            host.groups.join(settings.get("timeout"))
            _share_loss_handlers(undo)
            return dist.group.WORLD, host.groups.store
        # torch does not pass the description to a custom backend, so the options carry it.
        settings.update(backend_options=settings.get("group_desc"), device_id=None)
        return make_group(size, rank, ranks, dist.Backend(BACKEND), *rest, **settings)

    replace_until(undo, c10d, "rendezvous", functools.partial(_rendezvous, host))
    for make_store in ("_create_c10d_store", "FileStore"):
        replace_until(undo, _RENDEZVOUS, make_store, lambda *_, **__: host.groups.store)
    replace_until(undo, c10d, "_new_process_group_helper", make_simulated_group)


_LOSS = "torch.distributed.tensor.parallel.loss"


class _LossHandlers:
    """Keeps DTensor's handlers for ``loss_parallel`` until the last rank has left that context.

    The table of handlers belongs to the process.
    """

    def __init__(self, loss: Any) -> None:
        self._enable, self._disable = loss._enable_custom_loss_ops, loss._disable_custom_loss_ops
        self._num_users = 0

    def enter(self) -> None:
        self._num_users += 1
        self._enable()

    def leave(self) -> None:
        self._num_users -= 1
        if not self._num_users:
            self._disable()

    def close(self) -> None:
        if self._num_users:  # an exception has skipped a rank's exit
            self._disable()


def _share_loss_handlers(undo: contextlib.ExitStack) -> None:
    """Patch ``loss_parallel`` when a rank joins a group, if the program has imported it by then."""
    loss: Any = sys.modules.get(_LOSS)  # importing it here would take a second
    owner = getattr(getattr(loss, "_enable_custom_loss_ops", None), "__self__", None)
    if loss is not None and not isinstance(owner, _LossHandlers):
        handlers = _LossHandlers(loss)
        undo.callback(handlers.close)
        replace_until(undo, loss, "_enable_custom_loss_ops", handlers.enter)
        replace_until(undo, loss, "_disable_custom_loss_ops", handlers.leave)


def _patch_default_group(undo: contextlib.ExitStack, host: RankHost) -> None:
    """Find the running rank's default group in fewer steps than torch does."""
    find_group, tables = c10d._group_or_default_group, host.rank_states.tables

    def group_or_default(group: Any = None) -> Any:
        if group is None:
            group = tables.default_pg
        return find_group() if group is None else group

    replace_until(undo, c10d, "_group_or_default_group", group_or_default)


def _patch_checks(undo: contextlib.ExitStack, host: RankHost) -> None:
    """Record each P2P batch when torch checks it, and allow DDP parameters on the meta device."""

    def verify_unless_meta(group: object, tensors: list[torch.Tensor], *rest: Any) -> None:
        if not tensors[0].is_meta:  # torch compares shapes as tensor data, which meta tensors lack
            verify(group, tensors, *rest)

    def check_batch(p2p_ops: list[dist.P2POp]) -> None:
        if not p2p_ops:
            raise IndexError(
                "batch_isend_irecv got an empty list: leave the call out where a rank has nothing "
                "to send or receive"
            )
        check(p2p_ops)
        if host.fleet is not None:
            host.fleet.begin_batch(host.rank_states.current, len(p2p_ops))
        elif host.mailbox.lanes is not None:
            host.mailbox.lanes.begin_batch(host.rank_states.current, len(p2p_ops))

    # batch_isend_irecv calls this check first, even if a program imported it under another name.
    check = replace_until(undo, c10d, "_check_p2p_op_list", check_batch)
    verify = replace_until(undo, dist, "_verify_params_across_processes", verify_unless_meta)


def _patch_clocks(of_ranks: OfRanks, host: RankHost) -> None:
    """Make clocks return a rank's virtual time, and sleeps take only virtual time."""

    def read_ns() -> int:
        return round(host.clock.read() * 10**9)

    def sleep(seconds: float) -> None:
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        host.clock.sleep(seconds)

    for name in ("perf_counter", "monotonic", "time"):
        of_ranks(time, name, host.clock.read)
        of_ranks(time, f"{name}_ns", read_ns)
    of_ranks(time, "sleep", sleep)


def _patch_timeit(undo: contextlib.ExitStack, of_ranks: OfRanks, read: Callable[[], float]) -> None:
    """Make ``timeit`` and torch's benchmarks, which use it, measure a rank's virtual time.

    The functions of ``timeit`` have kept the timer that they found first as a default argument.
    """
    kept = timeit.default_timer
    of_ranks(timeit, "default_timer", read)
    functions: tuple[Any, ...] = (timeit.Timer.__init__, timeit.timeit, timeit.repeat)
    for function in functions:
        defaults = function.__defaults__
        undo.callback(setattr, function, "__defaults__", defaults)
        function.__defaults__ = tuple(timeit.default_timer if d is kept else d for d in defaults)


def _patch_process(of_ranks: OfRanks, host: RankHost) -> None:
    """Give each rank its own working folder, signal handlers and ``os._exit``."""
    of_ranks(os, "chdir", host.rank_states.change_folder)
    of_ranks(os, "_exit", lambda status: host.end_process(f"os._exit({status})"))
    Signals(host).install(of_ranks)


def _patch_host(of_ranks: OfRanks, rank_states: RankStates) -> None:
    """Give each rank its node's host name, so that it can find the other ranks on its node."""
    uname = os.uname

    def name_of_rank() -> str:
        return rank_states.state().host

    def uname_of_rank() -> os.uname_result:
        system, _, *rest = uname()
        return os.uname_result((system, name_of_rank(), *rest))

    of_ranks(socket, "gethostname", name_of_rank)
    of_ranks(platform, "node", name_of_rank)
    of_ranks(os, "uname", uname_of_rank)


def _patch_gpus(of_ranks: OfRanks, rank_states: RankStates) -> None:
    """Refuse to use a real GPU, in place of an error from inside torch."""

    def refuse(*_: object) -> None:
        raise RuntimeError(_without_gpu(rank_states.current))

    of_ranks(torch.cuda, "_lazy_init", refuse)  # for tensors and models with device="cuda"
    of_ranks(torch.cuda, "set_device", refuse)


def _without_gpu(rank: int) -> str:
    return (
        f"rank {rank} has no GPU to select: simulated ranks compute on the CPU, and the simulator "
        "takes that for the GPU's work. Select one only where torch.cuda.is_available(), or "
        "simulate GPUs as well: distlab sim --semantics nccl"
    )


def explain_missing_gpu(error: BaseException, rank: int) -> None:
    """Say in torch's own error, too, that the rank has no GPU.

    torch's C++ code asks ``_lazy_init`` only until it has once succeeded, as it does in a world
    with GPUs that this process has run before.
    """
    if isinstance(error, NotImplementedError) and "'CUDA' backend" in str(error):
        error.args = (_without_gpu(rank),)


def _patch_swapping(replace: Replace) -> None:
    """Let FSDP2 swap parameters that the simulator watches by weak references.

    torch refuses to swap a tensor with weak references to it. Those of the simulator stay right,
    because a swap exchanges contents and not objects.
    """
    replace(torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda _: []))


def _patch_redistribution(replace: Replace, rank_states: RankStates) -> None:
    """Let each rank plan how to redistribute a DTensor: plans depend on the sizes of its shards.

    torch keeps plans and planners per process.
    """

    @functools.cache
    def plan(_rank: int, *specs: Any) -> Any:
        return redistribution._gen_transform_infos_non_cached(*specs)

    def plan_of_rank(*specs: Any) -> Any:
        return plan(rank_states.current, *specs)

    plan_of_rank.cache_clear = plan.cache_clear  # type: ignore[attr-defined]
    replace(redistribution, "_gen_transform_infos", plan_of_rank)
    replace(redistribution, "get_redistribute_planner", redistribution.DTensorRedistributePlanner)


def _patch_rpc(of_ranks: OfRanks, rank_states: RankStates) -> None:
    """Refuse remote calls, which would wait forever for a connection."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(
            f"rank {rank_states.current} cannot use torch.distributed.rpc: it calls functions in "
            "other processes, and simulated ranks are threads of one. Run the script with torchrun"
        )

    of_ranks(torch.distributed.rpc, "init_rpc", refuse)


def _patch_spawning(of_ranks: OfRanks, host: RankHost) -> None:
    """Refuse to start further ranks."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(
            f"rank {host.rank_states.current} cannot start processes by "
            f"torch.multiprocessing.spawn: {_IN_SESSION if is_session else _IN_SCRIPT}"
        )

    is_session = host.scheduler.keeps_threads
    spawning = sys.modules["torch.multiprocessing.spawn"]  # the package's name is its function
    for owner in (spawning, torch.multiprocessing):
        of_ranks(owner, "start_processes", refuse)


_IN_SESSION = "this code runs on the ranks already, so call the function itself"
_IN_SCRIPT = (
    "distlab sim has started the ranks already, as torchrun does, because the script asks for "
    "RANK, LOCAL_RANK or WORLD_SIZE before, joins a group before, or imports what calls spawn. If "
    "it asks for the number of its node, set that: RANK=0 WORLD_SIZE=1 distlab sim …"
)


def _patch_generators(of_ranks: OfRanks, rank_states: RankStates) -> None:
    """Make functions such as ``np.random.rand`` draw from the running rank's generators."""
    for module, generator, names in (
        (random, "python_rng", PYTHON_FUNCTIONS),
        (np.random, "numpy_rng", NUMPY_FUNCTIONS),
    ):
        for name in names:
            of_ranks(module, name, functools.partial(_draw, rank_states, generator, name))


def _draw(rank_states: RankStates, generator: str, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(getattr(rank_states.state(), generator), name)(*args, **kwargs)


# ``torch.meta`` is to the meta device what ``torch.cuda`` is to GPUs: FSDP2 needs it to shard over
# a "meta" mesh. FSDP assumes that a parameter on meta was left there by mistake, and refuses to
# train. Simulated ranks, however, use meta like a GPU, for models too large for this machine.

_OWNER = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


class MetaHandle:
    """Provides the CPU's streams and events, which do nothing, for meta tensors.

    Args:
        undo: Stack that will undo the change to FSDP; the change is made when FSDP is first used.
    """

    def __init__(self, undo: contextlib.ExitStack) -> None:
        self._undo = undo
        self._is_used = False

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        """Return the device's index; FSDP calls this first, so its check is disabled here."""
        owner = sys.modules.get(_OWNER)
        if owner is not None and not self._is_used:
            self._is_used = True
            self._let_train(owner.FSDPParamGroup)
        return 0

    def _let_train(self, groups: Any) -> None:
        """Disable FSDP's check: not earlier, because importing FSDP takes a second."""
        check = groups._validate_no_meta_params
        self._undo.callback(setattr, groups, "_validate_no_meta_params", check)
        groups._validate_no_meta_params = lambda _: None
