"""``run``: one call that runs a function on every rank and returns a result per rank."""

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import psutil
import torch
import torch.distributed as dist

from distlab.launch import fork_server, safe_pickle, simulation_process, verdict, world
from distlab.launch.errors import LaunchError, RankFailed, SetupError
from distlab.launch.external_launchers import run_joined, run_under_mpirun
from distlab.launch.limits import Exceeded, Limits
from distlab.launch.protocol import SimulationSpec, Spec, WorldFolder, pickled
from distlab.launch.rank import RankProcess
from distlab.launch.rank_report import SLOW_IMPORTS
from distlab.launch.supervisor import Supervisor

BACKENDS = ("auto", "gloo", "nccl", "sim", "mpi")
DEVICES = ("auto", "cpu", "cuda")
if TYPE_CHECKING:
    from distlab.sim import Cluster, Options, Simulated

FOR_EVER_S = 20 * 24 * 3600.0  # torch's own limit of a collective is 30 minutes
MAX_SHOWN_BYTES = 256 * 1024  # of what ranks print, a world, where results must be plain
MEMORY_SHARE = 0.9  # of what is free at the start, for all ranks together

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    backend: str = "auto",
    device: str = "auto",
    timeout_s: float | None = 300.0,
    cpu_limit_s: float | None = None,
    idle_limit_s: float | None = None,
    memory_limit_bytes: int | None = None,
    plain_results: bool = False,
    output_dir: Path | str | None = None,
    cluster: "Cluster | str | None" = None,
    given: Sequence[str] = (),
) -> list[T]:
    """Call ``fn(*args)`` on every rank of a ``torch.distributed`` world; return what each returned.

        run(dist.get_rank, 3)  ->  [0, 1, 2]

    Inside, the process group is initialised and ``context()`` tells the device. The first call
    starts a fork server, later ones only fork. Under torchrun or mpirun, this process joins their
    world instead and every rank gets all results; torchrun or mpirun then watches the processes,
    and ``timeout_s`` bounds each collective. Ranks end without running what ``atexit`` holds.

    Args:
        fn: any function, also a lambda or one defined in a script or notebook.
        world_size: number of ranks, at least 1.
        args: given to ``fn`` on every rank, pickled.
        backend: "gloo"; "nccl", one GPU per rank; "sim", a simulated cluster; "mpi", under
            mpirun; "auto": mpi if mpirun started several ranks, nccl if there are enough GPUs, else
            gloo.
        device: "cpu"; "cuda" (ranks share GPUs if there are fewer, gloo only); "auto": by backend.
        timeout_s: for ``fn``, from the moment all ranks are up; None or inf waits for ever.
        cpu_limit_s: that each rank may compute. It finds an endless loop before ``timeout_s`` does,
            which also counts what a busy machine takes; by default there is none.
        idle_limit_s: that may pass with no rank computing, not even its share of a collective. It
            finds ranks that wait for each other before ``timeout_s`` does; by default, none.
        memory_limit_bytes: that all ranks together may allocate, the processes that they start
            not counted; by default 90 % of what is free.
        plain_results: accept plain data alone, numbers, strings and containers of them, up to the
            limits of ``safe_pickle``, and show 256 KiB of what ranks print: somebody else's code
            then neither runs here nor fills this process.
        output_dir: where everything that rank k prints is also kept, as ``rank-<k>.log``; of ranks
            that this call starts as processes, so not with "sim".
        cluster: with "sim", the cluster or the name of a preset; see ``simulate``.
        given: folders of the caller's own machinery: no verdict names one of their lines.

    Returns:
        The results, by rank. Tensors should be on the CPU.

    Raises:
        SetupError: bad arguments, too few GPUs, or a platform without a process world.
        LaunchError: one of ``errors``; then no process of the world is left.

    Cost: about 0.1 s for 4 gloo ranks once the fork server runs, 1 s before.
    """
    _check(fn, world_size, backend, device, timeout_s)
    limits = _limits(timeout_s, cpu_limit_s, idle_limit_s, memory_limit_bytes, plain_results)
    if cluster is not None and backend != "sim":
        raise SetupError(f"cluster={cluster!r} is for backend sim, not for backend {backend}")
    if backend == "sim":
        _check_sim(device, output_dir)
        simulation = SimulationSpec(world_size, cluster, _options(given), wants_trace=False)
        results = _simulated(fn, args, simulation, limits, plain_results)
        return cast("list[T]", results)
    if backend == "mpi" or (backend == "auto" and world.is_one_of_mpiruns()):
        _check_mpi(device)
        return run_under_mpirun(fn, world_size, args, limits.timeout_s)
    if world.started_by_torchrun():
        chosen, devices = _choose(backend, device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        return run_joined(
            fn, world_size, args, chosen, torch.device(devices[local_rank]), limits.timeout_s
        )

    chosen, devices = _choose(backend, device, world_size)
    with _refusals():
        spec = _spec(fn, args, chosen, devices, limits.timeout_s, given, plain_results)
        with _world(spec, limits, output_dir) as (ranks, _, exceeded):
            error = verdict.judge(ranks, exceeded)
    if error:
        raise error
    return cast("list[T]", [_result(rank, len(ranks), plain_results) for rank in ranks])


def _options(given: Sequence[str]) -> "Options | None":
    from distlab.sim import Options  # with all of the simulator: only where needed

    return Options(given=tuple(given)) if given else None


def _result(rank: RankProcess, world_size: int, plain_results: bool) -> object:
    sent = rank.report.result if rank.report else b""
    if not plain_results:
        return pickle.loads(sent)
    try:
        return safe_pickle.loads_result(sent)
    except safe_pickle.NotPlainError as error:
        who = f"rank {rank.number} of {world_size}"
        raise RankFailed(f"{who} returned {error}", rank=rank.number) from None


def simulate(
    fn: Callable[..., T],
    num_ranks: int,
    *args: object,
    cluster: "Cluster | str | None" = None,
    options: "Options | None" = None,
    timeout_s: float | None = 300.0,
    cpu_limit_s: float | None = None,
    idle_limit_s: float | None = None,
    memory_limit_bytes: int | None = None,
    plain_results: bool = False,
) -> "Simulated[T]":
    """Run ``fn(*args)`` on a simulated cluster, in a supervised process; return results and trace.

    Like ``distlab.sim.simulate``, and an endless loop, a crash or ``os._exit`` in a rank is one
    clear error too.

    Args:
        fn: as for ``run``.
        num_ranks: 1 to 1024.
        args: given to ``fn`` on every rank, pickled.
        cluster: a cluster, the name of a preset, or None for a switch with a GPU per rank.
        options: how to simulate.
        timeout_s: of real time; None or inf waits for ever.
        cpu_limit_s: that all ranks together may compute, of real time.
        idle_limit_s: that may pass without any computing, of real time.
        memory_limit_bytes: of real memory; by default 90 % of what is free.
        plain_results: as for ``run``.

    Raises:
        SetupError: bad arguments.
        LaunchError: one of ``errors``; a deadlock is a RankHung, found at once.
    """
    _check(fn, num_ranks, "sim", "cpu", timeout_s)
    simulation = SimulationSpec(num_ranks, cluster, options, wants_trace=True)
    limits = _limits(timeout_s, cpu_limit_s, idle_limit_s, memory_limit_bytes, plain_results)
    outcome = _simulated(fn, args, simulation, limits, plain_results)
    return cast("Simulated[T]", outcome)


def _simulated(
    fn: object,
    args: tuple[object, ...],
    simulation: SimulationSpec,
    limits: Limits,
    plain_results: bool,
) -> object:
    simulation_process.check(simulation)
    with _refusals():
        given = simulation_process.given_of(simulation)
        spec = _spec(fn, args, "sim", ("cpu",), limits.timeout_s, given, plain_results)
        spec = replace(spec, simulation=simulation)
        with _world(spec, limits, None) as ((process,), folder, exceeded):
            outcome = simulation_process.read_outcome(
                process,
                simulation,
                folder,
                exceeded=exceeded,
                plain_results=plain_results,
            )
    if isinstance(outcome, LaunchError):
        raise outcome
    return outcome


def _spec(
    fn: object,
    args: tuple[object, ...],
    backend: str,
    devices: tuple[str, ...],
    timeout_s: float | None,
    given: Sequence[str],
    plain_results: bool,
) -> Spec:
    return Spec(
        world_size=len(devices),
        backend=backend,
        devices=devices,
        # The parent's clock strikes first: it can say more than "timed out waiting for recv".
        collective_timeout_s=FOR_EVER_S if timeout_s is None else timeout_s + 60,
        payload=_pickled(fn, args),
        environ=dict(os.environ),
        argv=tuple(sys.argv),
        working_dir=os.getcwd(),
        sys_path=tuple(sys.path),
        given=tuple(given),
        max_result_bytes=safe_pickle.MAX_RESULT_BYTES if plain_results else None,
    )


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what the operating system refuses, files or processes, into the error of a set-up."""
    try:
        yield
    except BrokenPipeError:  # whoever read our output has gone: that is no fault of the world
        raise
    except OSError as error:
        raise SetupError(f"this machine refuses what a world needs: {error}") from error


@contextmanager
def _world(
    spec: Spec,
    limits: Limits,
    output_dir: Path | str | None,
) -> Iterator[tuple[list[RankProcess], WorldFolder, Exceeded | None]]:
    """Run a world to its end; yield its ranks, its folder and the time limit that it exceeded."""
    with fork_server.borrowed() as home, home.world_folder() as folder:
        folder.write_spec(spec)
        supervisor = Supervisor(home, folder, limits, _made(output_dir), spec.given)
        ranks = supervisor.run(spec.world_size)
        home.preload(_slow_imports(ranks))
        yield ranks, folder, supervisor.exceeded


def _check(fn: object, world_size: int, backend: str, device: str, timeout_s: float | None) -> None:
    """Refuse what cannot work before anything is started."""
    if sys.platform == "win32":
        raise SetupError(
            "real processes need Linux or macOS: on Windows, use WSL2 (wsl --install) and run the "
            "course inside it"
        )
    if not callable(fn):
        raise SetupError(f"run needs a function, got {fn!r}")
    if not isinstance(world_size, int) or world_size < 1:
        raise SetupError(f"world_size must be a whole number from 1 on, got {world_size!r}")
    for name, value, valid in (("backend", backend, BACKENDS), ("device", device, DEVICES)):
        if value not in valid:
            raise SetupError(f"{name} must be one of {', '.join(valid)}; got {value!r}")
    if timeout_s is not None and not _is_positive(timeout_s):
        raise SetupError(f"timeout_s must be positive or None, got {timeout_s!r}")
    if world.is_one_of_mpiruns() and backend not in ("auto", "mpi"):
        raise SetupError(
            f"mpirun started this process and its like, and each would start {world_size} ranks of "
            f"backend {backend}: use backend mpi, or leave mpirun out"
        )
    if backend == "sim" and world.launcher_of_several() == "torchrun":
        raise SetupError(
            "torchrun, or what sets its variables, started this process and its like, and each "
            f"would simulate all {world_size} ranks: backend sim needs one process only, so leave "
            "torchrun out"
        )
    if dist.is_initialized() and not _has_joined():
        raise SetupError("run was called inside a world: a rank cannot start another world")


def _is_positive(value: object) -> bool:
    return isinstance(value, Real) and float(value) > 0


def _finite(timeout_s: float | None) -> float | None:
    """A limit that clocks can count to, or none."""
    return None if timeout_s is None or timeout_s >= FOR_EVER_S else float(timeout_s)


def _has_joined() -> bool:
    """Tell whether the world around is one that other launchers started: ``run`` only joins it."""
    return world.started_by_torchrun() or world.mpirun_size() is not None


def _check_sim(device: str, output_dir: Path | str | None) -> None:
    if device == "cuda":
        raise SetupError("backend sim computes on the CPU, with simulated GPUs: use device cpu")
    if output_dir is not None:
        raise SetupError(
            f"output_dir={str(output_dir)!r} is for real processes: all ranks of backend sim print "
            "to the output of one"
        )


def _check_mpi(device: str) -> None:
    if device == "cuda":
        raise SetupError("backend mpi moves tensors on the CPU: use device cpu")


def _choose(backend: str, device: str, num_ranks: int) -> tuple[str, tuple[str, ...]]:
    """Settle backend and devices for the ranks of this machine."""
    num_gpus = torch.cuda.device_count()
    if backend == "auto":
        fits = device != "cpu" and num_gpus >= num_ranks and dist.is_nccl_available()
        backend = "nccl" if fits else "gloo"
    if backend == "nccl" and (num_gpus < num_ranks or device == "cpu"):
        raise SetupError(
            f"backend nccl needs a GPU per rank: {num_ranks} ranks, {num_gpus} GPUs, device "
            f"{device}. Use fewer ranks, or backend gloo"
        )
    if device == "cuda" and not num_gpus:
        raise SetupError("device cuda: torch sees no GPU here. Use device cpu; see distlab doctor")
    if backend == "nccl" or device == "cuda":
        return backend, tuple(f"cuda:{rank % num_gpus}" for rank in range(num_ranks))
    return backend, ("cpu",) * num_ranks


def _pickled(fn: object, args: tuple[object, ...]) -> bytes:
    try:
        return pickled((fn, args))
    except Exception as error:
        name, value = _unpicklable(fn, args)
        raise SetupError(
            f"{name}, {value!r}, cannot be sent to the ranks ({error}): build such objects "
            "inside the function"
        ) from error


def _unpicklable(fn: object, args: tuple[object, ...]) -> tuple[str, object]:
    for i, value in enumerate(args):
        try:
            pickled(value)
        except Exception:
            return f"argument {i}", value
    return "the function", fn


def _limits(
    timeout_s: float | None,
    cpu_s: float | None,
    idle_s: float | None,
    memory_bytes: int | None,
    plain_results: bool,
) -> Limits:
    for name, value in (("cpu_limit_s", cpu_s), ("idle_limit_s", idle_s)):
        if value is not None and not _is_positive(value):
            raise SetupError(f"{name} must be positive or None, got {value!r}")
    free_bytes = int(MEMORY_SHARE * psutil.virtual_memory().available)
    limits = Limits(_finite(timeout_s), cpu_s, idle_s, memory_bytes or free_bytes)
    if not plain_results:
        return limits
    return replace(limits, report_bytes=safe_pickle.MAX_REPORT_BYTES, output_bytes=MAX_SHOWN_BYTES)


def _made(output_dir: Path | str | None) -> Path | None:
    if output_dir is None:
        return None
    path = Path(output_dir)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _slow_imports(ranks: list[RankProcess]) -> list[str]:
    """What ranks say that they have imported, of what is known to be slow and harmless."""
    loaded = {name for rank in ranks if rank.report for name in rank.report.modules}
    return sorted(loaded.intersection(SLOW_IMPORTS))
