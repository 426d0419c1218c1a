"""The world ``sim``, supervised: the simulated cluster runs in a process of its own.

So an endless loop, a crash or ``os._exit`` in a simulated rank is one clear error in time, as in
the other worlds, and a simulation leaves nothing behind in the process that asked for it.
"""

import mmap
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import cloudpickle
import torch

from distlab import sim
from distlab.launch import stacks, verdict, world
from distlab.launch.errors import (
    LaunchError,
    RankExited,
    RankFailed,
    RankHung,
    RankOutOfMemory,
    SetupError,
)
from distlab.launch.protocol import SimulationSpec, Spec, WorldFolder
from distlab.launch.supervisor import Rank

T = TypeVar("T")
WORD_BYTES = 8


def check_cluster(cluster: sim.Cluster | str | None, num_ranks: int) -> None:
    """Refuse a cluster that does not exist or has too few GPUs.

    Raises:
        SetupError: with the names that exist.
    """
    try:
        sim.choose_cluster(cluster, num_ranks)
    except ValueError as error:
        raise SetupError(str(error)) from None


def simulate_in_child(spec: Spec, simulation: SimulationSpec, folder: WorldFolder) -> bytes:
    """Run the simulation that ``spec`` describes; return it, or its error, pickled."""
    fn, args = pickle.loads(spec.payload)
    running = _shared_words(folder.running, 1 + simulation.num_ranks)
    outcome: object
    try:
        outcome = sim.simulate(
            partial(_on_cpu, fn),
            simulation.num_ranks,
            *args,
            cluster=simulation.cluster,
            options=simulation.options,
            running=running,
        )
    except sim.SimulationError as error:
        outcome = error
    return bytes(cloudpickle.dumps(outcome))


def _on_cpu(fn: Callable[..., T], *args: object) -> T:
    """Call ``fn`` where ``context()`` knows the device: simulated GPUs compute on the CPU."""
    with world.on_device(torch.device("cpu")):
        return fn(*args)


def _shared_words(path: Path, count: int) -> memoryview:
    """Map a file of integers that the parent can read whatever this process is doing."""
    path.write_bytes(bytes(WORD_BYTES * count))
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")


def read_outcome(process: Rank, simulation: SimulationSpec, folder: WorldFolder) -> object:
    """Return what the simulation returned, or raise what ended it.

    Raises:
        LaunchError: a rank failed, the ranks deadlocked, or the process did not return.
    """
    if process.has_returned and process.report:
        outcome = pickle.loads(process.report.result)
        if isinstance(outcome, sim.SimulationError):
            raise _as_launch_error(outcome) from None
        return outcome
    raise _lost_simulation(process, simulation, folder)


def _as_launch_error(error: sim.SimulationError) -> LaunchError:
    """The same error as in the other worlds."""
    rank = error.ranks[0] if len(error.ranks) == 1 else None
    kind: type[LaunchError] = RankFailed
    if isinstance(error, sim.Deadlock):
        kind = RankHung
    elif isinstance(error, sim.RankError):
        kind = {"OutOfMemory": RankOutOfMemory, "SystemExit": RankExited}.get(
            error.exception, RankFailed
        )
    return kind(str(error), rank=rank)


def _lost_simulation(process: Rank, simulation: SimulationSpec, folder: WorldFolder) -> LaunchError:
    """The error of a simulation that crashed, left or did not end: say which rank was running."""
    words = memoryview(folder.running.read_bytes()).cast("q") if folder.running.exists() else None
    number = words[0] if words else 0
    dump = folder.stacks(0).read_text(errors="replace") if folder.stacks(0).exists() else ""
    place = stacks.read_place(dump, ident=words[1 + number] if words else None)
    who = f"simulated rank {number} of {simulation.num_ranks}"
    if process.was_stopped and not process.exceeded_memory:
        source = f"\n  {place.frame}  {place.frame.source}" if place.frame else ""
        return RankHung(f"time is up: {who} is {place}{source}", rank=number)
    if process.report:
        return RankFailed(f"{process.report.headline}\n\n{process.report.traceback}".rstrip())
    process.place = None  # of the main thread, which only waits for the ranks
    kind, headline = verdict.cause(process)
    where = f" {place}" if place.frame else ""
    return kind(f"{who} was running when its process {headline}{where}", rank=number)
