"""``run`` and ``simulate``: run a function on every rank of a world."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from distlab.launch import choices, fork_server, verdict
from distlab.launch.errors import LaunchError, SetupError
from distlab.launch.external_launchers import run_joined, run_under_mpirun
from distlab.launch.launchers import launched
from distlab.launch.limits import FOREVER_S, Exceeded, Limits
from distlab.launch.protocol import SimulationSpec, Spec, WorldFolder
from distlab.launch.rank import SLOW_IMPORTS, RankProcess, decoded
from distlab.launch.simulation import check_simulation, given_of, read_outcome
from distlab.launch.supervisor import Supervisor

if TYPE_CHECKING:
    from distlab.sim import Cluster, Options, Simulated

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    backend: str = "auto",
    device: str = "auto",
    timeout_s: float | None = Limits.timeout_s,
    limits: Limits | None = None,
    plain_results: bool = False,
    output_dir: Path | str | None = None,
    cluster: "Cluster | str | None" = None,
    given: Sequence[str] = (),
) -> list[T]:
    """Call ``fn(*args)`` on every rank of a ``torch.distributed`` world; return all results.

        run(dist.get_rank, 3)  ->  [0, 1, 2]

    Inside ``fn``, the process group is initialised and ``context()`` gives the device. The first
    call starts a fork server; later calls only fork. Ranks do not run ``atexit`` handlers.

    Under torchrun, mpirun or srun, nothing is started: this process joins the launcher's world as
    one of its ranks, and the call returns all results on every rank. The launcher watches the
    processes, and the timeout applies to each collective.

    Args:
        fn: Any function, including a lambda or one defined in a script or notebook.
        world_size: Number of ranks, at least 1.
        args: Arguments for ``fn``, pickled; the same on every rank.
        backend: "gloo", "nccl" (one GPU per rank), "sim" (a simulated cluster), "mpi" (under
            mpirun), or "auto", which chooses mpi if mpirun started several ranks, otherwise nccl if
            there are enough GPUs, and otherwise gloo.
        device: "cpu", "cuda", or "auto", which means "cuda" with nccl and "cpu" otherwise. With
            gloo, ranks may share GPUs, but can use GPU tensors only in collectives, not in sends.
        timeout_s: Time limit for ``fn``, counted from the moment all ranks are up; None or inf
            means no limit. Shorthand for ``limits=Limits(timeout_s)``.
        limits: Time and memory limits; see ``Limits``.
        plain_results: True to accept only plain data as results, within the limits of ``plain``,
            and to show only 256 KiB of the ranks' output. Untrusted code can then neither run in
            this process nor fill its memory.
        output_dir: Folder in which the output of each rank k is also saved, as ``rank-<k>.log``;
            only for ranks that this call starts as processes, so not with "sim".
        cluster: For "sim": a cluster or the name of a preset; see ``simulate``.
        given: Folders of the caller's own machinery, such as a grader; verdicts never point to
            lines in them.

    Returns:
        The results, in rank order. Any tensors in them should be on the CPU.

    Raises:
        SetupError: Bad arguments, too few GPUs, or a platform that cannot run real processes.
        LaunchError: The world failed, as described in ``errors``; all its processes have ended.

    Cost: about 0.1 s for 4 gloo ranks if the fork server is running, and 1 s if it is not.
    """
    choices.check(fn, world_size, backend, device)
    limits = choices.limits_of(timeout_s, limits)
    started_by = launched(backend)
    is_mpi = backend == "mpi" or (started_by is not None and started_by.launcher == "mpirun")
    choices.check_for_backend("mpi" if is_mpi else backend, device, cluster, output_dir)
    if backend == "sim":
        simulation = SimulationSpec(world_size, cluster, _options(given), wants_trace=False)
        return cast("list[T]", _simulated(fn, args, simulation, limits, plain_results))
    if is_mpi:
        return run_under_mpirun(fn, world_size, args, started_by, limits.finite_timeout_s)
    if started_by:
        return run_joined(
            fn, world_size, args, started_by, backend, device, limits.finite_timeout_s
        )

    chosen, devices = choices.devices(backend, device, world_size)
    with _refusals():
        spec = _spec(fn, args, chosen, devices, limits, given, plain_results)
        with _world(spec, limits, output_dir) as (ranks, _, exceeded):
            error = verdict.judge(ranks, exceeded)
    if error:
        raise error
    results = [rank.report.result if rank.report else b"" for rank in ranks]
    return decoded(results, plain_results=plain_results)


def _options(given: Sequence[str]) -> "Options | None":
    from distlab.sim import Options  # imports the whole simulator, so not at the top

    return Options(given=tuple(given)) if given else None


def simulate(
    fn: Callable[..., T],
    num_ranks: int,
    *args: object,
    cluster: "Cluster | str | None" = None,
    options: "Options | None" = None,
    limits: Limits | None = None,
    plain_results: bool = False,
) -> "Simulated[T]":
    """Run ``fn(*args)`` on a simulated cluster, in a supervised process; return results and trace.

    This is ``distlab.sim.simulate`` in a process of its own, so that infinite loops, crashes and
    ``os._exit`` also surface as a single LaunchError.

    Args:
        fn: Function, as for ``run``.
        num_ranks: Number of ranks, 1 to 1024.
        args: Arguments for ``fn``, pickled; the same on every rank.
        cluster: A cluster, the name of a preset, or None for one switch with a GPU per rank.
        options: Simulation options.
        limits: Limits on the real time and the memory of the process that runs all ranks.
        plain_results: True to accept only plain data, as for ``run``.

    Raises:
        SetupError: Bad arguments.
        LaunchError: The program failed, as described in ``errors``. A deadlock is detected
            immediately and raised as RankHung.
    """
    choices.check(fn, num_ranks, "sim", "cpu")
    simulation = SimulationSpec(num_ranks, cluster, options, wants_trace=True)
    outcome = _simulated(fn, args, simulation, limits or Limits(), plain_results)
    return cast("Simulated[T]", outcome)


def _simulated(
    fn: Callable[..., object],
    args: tuple[object, ...],
    simulation: SimulationSpec,
    limits: Limits,
    plain_results: bool,
) -> object:
    check_simulation(simulation)
    with _refusals():
        given = given_of(simulation)
        spec = _spec(fn, args, "sim", ("cpu",), limits, given, plain_results)
        spec = replace(spec, simulation=simulation)
        with _world(spec, limits, None) as ((process,), folder, exceeded):
            outcome = read_outcome(
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
    fn: Callable[..., object],
    args: tuple[object, ...],
    backend: str,
    devices: tuple[str, ...],
    limits: Limits,
    given: Sequence[str],
    plain_results: bool,
) -> Spec:
    timeout_s = limits.finite_timeout_s
    return Spec(
        world_size=len(devices),
        backend=backend,
        devices=devices,
        # Longer than the parent's limit, whose error says more than "timed out waiting for recv".
        collective_timeout_s=FOREVER_S if timeout_s is None else timeout_s + 60,
        payload=choices.payload(fn, args),
        environ=dict(os.environ),
        argv=tuple(sys.argv),
        working_dir=os.getcwd(),
        sys_path=tuple(sys.path),
        given=tuple(given),
        plain_results=plain_results,
    )


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise SetupError if the operating system refuses to create files or processes."""
    try:
        yield
    except BrokenPipeError:  # whoever read our output has gone, which is not the world's fault
        raise
    except OSError as error:
        raise SetupError(f"this machine refuses what a world needs: {error}") from error


@contextmanager
def _world(
    spec: Spec,
    limits: Limits,
    output_dir: Path | str | None,
) -> Iterator[tuple[list[RankProcess], WorldFolder, Exceeded | None]]:
    """Run a world to completion; yield its ranks, folder and the time limit it exceeded, if any."""
    with fork_server.borrowed() as home, home.world_folder() as folder:
        folder.write_spec(spec)
        logs = None if output_dir is None else Path(output_dir)
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
        supervisor = Supervisor(home, folder, spec, limits, logs)
        ranks = supervisor.run()
        # For the next world, preload the slow, harmless modules that these ranks imported.
        imported = {name for rank in ranks if rank.report for name in rank.report.modules}
        home.preload(imported.intersection(SLOW_IMPORTS))
        yield ranks, folder, supervisor.exceeded
