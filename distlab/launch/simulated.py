"""The world ``sim``, supervised: the simulated cluster runs in a process of its own.

So an endless loop, a crash or ``os._exit`` in a simulated rank is one clear error in time, as in
the other worlds, and a simulation leaves nothing behind in the process that asked for it.
"""

import mmap
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from distlab import sim
from distlab.launch import plain, sent, stacks, verdict, world
from distlab.launch.errors import (
    LaunchError,
    RankFailed,
    RankHung,
    SetupError,
)
from distlab.launch.protocol import SimulationSpec, Spec, WorldFolder
from distlab.launch.rank import Rank

T = TypeVar("T")
WORD_BYTES = 8
MAX_RANKS = 1024


def check(simulation: SimulationSpec) -> None:
    """Refuse too many ranks, a cluster that does not exist or is too small, faults of no rank.

    Raises:
        SetupError: with what there is instead.
    """
    if simulation.num_ranks > MAX_RANKS:
        raise SetupError(
            f"a simulated world has 1 to {MAX_RANKS} ranks, got {simulation.num_ranks}"
        )
    try:
        sim.choose_cluster(simulation.cluster, simulation.num_ranks)
        if simulation.options:
            simulation.options.faults.check_ranks(simulation.num_ranks)
    except ValueError as error:
        raise SetupError(str(error)) from None


def simulate_in_child(
    spec: Spec, simulation: SimulationSpec, folder: WorldFolder
) -> dict[str, object]:
    """Run the simulation that ``spec`` describes; return what ``sent`` makes of it.

    Raises:
        TypeError: a result cannot be pickled.
    """
    running = _shared_words(folder.running, 1 + simulation.num_ranks)
    try:
        simulated = sim.simulate(
            partial(_on_cpu, spec),
            simulation.num_ranks,
            cluster=simulation.cluster,
            options=simulation.options,
            running=running,
        )
    except sim.SimulationError as error:
        return sent.of_error(error)
    return sent.of_simulation(simulated, wants_trace=simulation.wants_trace)


def _on_cpu(spec: Spec) -> object:
    """Be one rank, where ``context()`` knows the device: simulated GPUs compute on the CPU.

    Each rank unpickles for itself: arguments, and globals of the caller's script, are its own.
    """
    fn, args = spec.function_and_arguments()
    with world.on_device(torch.device("cpu")):
        return fn(*args)


def _shared_words(path: Path, count: int) -> memoryview:
    """Map a file of integers that the parent can read whatever this process is doing."""
    path.write_bytes(bytes(WORD_BYTES * count))
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")


def read_outcome(
    process: Rank,
    simulation: SimulationSpec,
    folder: WorldFolder,
    *,
    exceeded_time: str,
    plain_results: bool,
) -> object:
    """Return what the simulation sent, or the LaunchError that tells what ended it.

    Args:
        process: of the simulation.
        simulation: what was asked for.
        folder: of its world.
        exceeded_time: the limit that ended it, "5 s"; "" if none did.
        plain_results: accept no others.
    """
    if process.has_returned and process.report:
        try:
            return sent.read(process.report.result, simulation, plain_results=plain_results)
        except plain.NotPlainError as error:
            return RankFailed(f"a simulated rank returned {error}, {plain.WANTED}")
    return _lost_simulation(process, simulation, folder, exceeded_time)


def _lost_simulation(
    process: Rank, simulation: SimulationSpec, folder: WorldFolder, exceeded_time: str
) -> LaunchError:
    """The error of a simulation that crashed, left or did not end: say which rank was running."""
    words = memoryview(folder.running.read_bytes()).cast("q") if folder.running.exists() else None
    number = words[0] if words else 0
    dump = folder.stacks(0).read_text(errors="replace") if folder.stacks(0).exists() else ""
    place = stacks.read_place(dump, ident=words[1 + number] if words else None)
    who = f"simulated rank {number} of {simulation.num_ranks}"
    if process.was_stopped and not process.exceeded_memory:
        source = f"\n  {place.frame}  {place.frame.source}" if place.frame else ""
        return RankHung(f"time is up after {exceeded_time}: {who} is {place}{source}", rank=number)
    if process.report:
        return RankFailed(f"{process.report.headline}\n\n{process.report.traceback}".rstrip())
    process.place = None  # of the main thread, which only waits for the ranks
    kind, headline = verdict.cause(process)
    where = f" {place}" if place.frame else ""
    return kind(f"{who} was running when its process {headline}{where}", rank=number)
