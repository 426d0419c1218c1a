"""``run``: one call that runs a function on every rank and returns a result per rank."""

import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import cloudpickle
import psutil
import torch
import torch.distributed as dist

from distlab.launch import nursery, simulated, verdict, world
from distlab.launch.errors import SetupError
from distlab.launch.joined import run_joined
from distlab.launch.protocol import SimulationSpec, Spec, WorldFolder
from distlab.launch.supervisor import Rank, Supervisor

BACKENDS = ("auto", "gloo", "nccl", "sim")
DEVICES = ("auto", "cpu", "cuda")
if TYPE_CHECKING:
    from distlab.sim import Cluster, Options, Simulated

MEMORY_SHARE = 0.9  # of what is free at the start, for all ranks together

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    backend: str = "auto",
    device: str = "auto",
    timeout_s: float | None = 300.0,
    memory_limit_bytes: int | None = None,
    output_dir: Path | None = None,
    cluster: "Cluster | str | None" = None,
) -> list[T]:
    """Call ``fn(*args)`` on every rank of a ``torch.distributed`` world; return what each returned.

        run(dist.get_rank, 3)  ->  [0, 1, 2]

    Inside, the process group is initialised and ``context()`` tells the device. The first call
    starts a fork server, later ones only fork. Under torchrun, this process joins torchrun's world
    instead and every rank gets all results; torchrun then watches the processes, and ``timeout_s``
    bounds each collective.

    Args:
        fn: any function, also a lambda or one defined in a script or notebook.
        world_size: number of ranks, at least 1.
        args: given to ``fn`` on every rank, pickled.
        backend: "gloo"; "nccl", one GPU per rank; "sim", a simulated cluster; "auto": nccl if
            there are enough GPUs, else gloo.
        device: "cpu"; "cuda" (ranks share GPUs if there are fewer, gloo only); "auto": by backend.
        timeout_s: of the whole call; None waits for ever.
        memory_limit_bytes: that all ranks together may allocate; by default 90 % of what is free.
        output_dir: where everything that rank k prints is also kept, as ``rank-<k>.log``.
        cluster: with "sim", the cluster or the name of a preset; see ``simulate``.

    Returns:
        The results, by rank. Tensors should be on the CPU.

    Raises:
        SetupError: bad arguments, too few GPUs, or a platform without a process world.
        LaunchError: one of ``errors``; then no process of the world is left.

    Cost: about 0.1 s for 4 gloo ranks once the fork server runs, 1 s before.
    """
    _check(fn, world_size, backend, device, timeout_s)
    if cluster is not None and backend != "sim":
        raise SetupError(f"cluster={cluster!r} is for backend sim, not for backend {backend}")
    if backend == "sim":
        return simulate(
            fn,
            world_size,
            *args,
            cluster=cluster,
            timeout_s=timeout_s,
            memory_limit_bytes=memory_limit_bytes,
        ).results
    if world.started_by_torchrun():
        chosen, devices = _choose(backend, device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        return run_joined(
            fn, world_size, args, chosen, torch.device(devices[local_rank]), timeout_s
        )

    chosen, devices = _choose(backend, device, world_size)
    spec = _spec(fn, args, chosen, devices, timeout_s)
    with _world_folder() as folder:
        ranks, timed_out = _supervise(spec, folder, timeout_s, memory_limit_bytes, output_dir)
    error = verdict.judge(ranks, timed_out=timed_out, timeout_s=timeout_s)
    if error:
        raise error
    return [pickle.loads(rank.report.result) for rank in ranks if rank.report]


def simulate(
    fn: Callable[..., T],
    num_ranks: int,
    *args: object,
    cluster: "Cluster | str | None" = None,
    options: "Options | None" = None,
    timeout_s: float | None = 300.0,
    memory_limit_bytes: int | None = None,
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
        timeout_s: of real time; None waits for ever.
        memory_limit_bytes: of real memory; by default 90 % of what is free.

    Raises:
        SetupError: bad arguments.
        LaunchError: one of ``errors``; a deadlock is a RankHung, found at once.
    """
    _check(fn, num_ranks, "sim", "cpu", timeout_s)
    simulated.check_cluster(cluster, num_ranks)
    simulation = SimulationSpec(num_ranks, cluster, options)
    spec = replace(_spec(fn, args, "sim", ("cpu",), timeout_s), simulation=simulation)
    with _world_folder() as folder:
        (process, *_), _ = _supervise(spec, folder, timeout_s, memory_limit_bytes, None)
        outcome: Any = simulated.read_outcome(process, simulation, folder)
    return cast("Simulated[T]", outcome)


def _spec(
    fn: object,
    args: tuple[object, ...],
    backend: str,
    devices: tuple[str, ...],
    timeout_s: float | None,
) -> Spec:
    return Spec(
        world_size=len(devices),
        backend=backend,
        devices=devices,
        # The parent's clock strikes first: it can say more than "timed out waiting for recv".
        collective_timeout_s=None if timeout_s is None else timeout_s + 60,
        payload=_pickled(fn, args),
        environ=dict(os.environ),
        working_dir=os.getcwd(),
        sys_path=tuple(sys.path),
    )


def _supervise(
    spec: Spec,
    folder: WorldFolder,
    timeout_s: float | None,
    memory_limit_bytes: int | None,
    output_dir: Path | None,
) -> tuple[list[Rank], bool]:
    """Start the ranks and watch them to the end; tell whether time was up."""
    folder.write_spec(spec)
    with _nursery() as home:
        supervisor = Supervisor(
            home,
            folder,
            timeout_s=timeout_s,
            memory_limit_bytes=memory_limit_bytes or _default_memory_limit(),
            output_dir=_made(output_dir),
        )
        ranks = supervisor.run(spec.world_size)
        home.preload(_slow_imports(ranks))
    return ranks, supervisor.timed_out


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
    if timeout_s is not None and not timeout_s > 0:
        raise SetupError(f"timeout_s must be positive or None, got {timeout_s!r}")
    if dist.is_initialized() and not world.started_by_torchrun():
        raise SetupError("run was called inside a world: a rank cannot start another world")


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
    for name, value in [("the function", fn), *((f"argument {i}", a) for i, a in enumerate(args))]:
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise SetupError(
                f"{name}, {value!r}, cannot be sent to the ranks ({error}): build such objects "
                "inside the function"
            ) from error
    return bytes(cloudpickle.dumps((fn, args)))


def _default_memory_limit() -> int:
    return int(MEMORY_SHARE * psutil.virtual_memory().available)


def _made(output_dir: Path | None) -> Path | None:
    if output_dir is not None:
        output_dir.mkdir(parents=True, exist_ok=True)
    return output_dir


@contextmanager
def _world_folder() -> Iterator[WorldFolder]:
    path = Path(tempfile.mkdtemp(prefix="distlab-"))
    try:
        yield WorldFolder(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _nursery() -> Iterator[nursery.Nursery]:
    home = nursery.acquire()
    try:
        yield home
    finally:
        nursery.release(home)


def _slow_imports(ranks: list[Rank]) -> list[str]:
    return sorted({name for rank in ranks if rank.report for name in rank.report.modules})
