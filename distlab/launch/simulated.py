"""The world ``sim``, supervised: the simulated cluster runs in a process of its own.

So an endless loop, a crash or ``os._exit`` in a simulated rank is one clear error in time, as in
the other worlds, and a simulation leaves nothing behind in the process that asked for it.
"""

import mmap
import pickle
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from distlab import sim
from distlab.launch import plain, stacks, verdict, world
from distlab.launch.errors import (
    LaunchError,
    RankExited,
    RankFailed,
    RankHung,
    RankOutOfMemory,
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


def simulate_in_child(spec: Spec, simulation: SimulationSpec, folder: WorldFolder) -> object:
    """Run the simulation that ``spec`` describes; return it, its results alone, or its error."""
    running = _shared_words(folder.running, 1 + simulation.num_ranks)
    try:
        simulated = sim.simulate(
            partial(_on_cpu, spec),
            simulation.num_ranks,
            cluster=simulation.cluster,
            options=simulation.options,
            running=running,
        )
        return simulated if simulation.wants_trace else simulated.results
    except sim.SimulationError as error:
        return error


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
    process: Rank, simulation: SimulationSpec, folder: WorldFolder, *, plain_results: bool
) -> object:
    """Return what the simulation sent, or the LaunchError that tells what ended it."""
    if process.has_returned and process.report:
        sent = process.report.result
        try:
            outcome = plain.loads(sent, _is_of_sim) if plain_results else pickle.loads(sent)
        except plain.NotPlainError as error:
            return RankFailed(f"a simulated rank returned {error}, {plain.WANTED}")
        if isinstance(outcome, sim.SimulationError):
            return _as_launch_error(outcome)
        return outcome
    return _lost_simulation(process, simulation, folder)


def _is_of_sim(found: type) -> bool:
    return found.__module__.startswith("distlab.sim.")


def _as_launch_error(error: sim.SimulationError) -> LaunchError:
    """The same error as in the other worlds."""
    rank = error.ranks[0] if len(error.ranks) == 1 else None
    kind: type[LaunchError] = RankFailed
    exception = ""
    if isinstance(error, sim.Deadlock):
        kind = RankHung
    elif isinstance(error, sim.RankError):
        exception = error.exception
        kind = {"OutOfMemory": RankOutOfMemory, "SystemExit": RankExited}.get(exception, RankFailed)
    return kind(str(error), rank=rank, exception=exception)


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
