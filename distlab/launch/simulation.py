"""The supervised world ``sim``: the simulated cluster runs in its own process.

An endless loop, a crash or ``os._exit`` in a simulated rank becomes one clear error within the time
limit, as in the other worlds, and a simulation does not affect the calling process. The
simulation's process reports plain data:

    {"results": [bytes per rank], "seconds": …, "flops": […], "trace": {…} or None,
     "gpu_time": {…} or None}
    {"error": "RankHung", "kind": …, "message": …, "rank": … or None, "exception": …,
     "advice": …}

Results are encoded separately, because they may have to be pickled.
"""

import gc
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

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
from distlab.launch.limits import Exceeded
from distlab.launch.protocol import MAX_TEXT, WORD_BYTES, SimulationSpec, Spec, WorldFolder
from distlab.launch.rank import RankProcess, decoded, encoded
from distlab.sim.engine.trace import Event
from distlab.sim.reporting.errors import EXIT
from distlab.sim.results.gpu_time import GpuTime
from distlab.util.text import rank_names

T = TypeVar("T")


def check_simulation(simulation: SimulationSpec) -> None:
    """Refuse too many ranks, an unknown or too small cluster, and faults on nonexistent ranks.

    Raises:
        SetupError: The simulation is impossible; the message says what is valid.
    """
    try:
        sim.choose_cluster(simulation.cluster, simulation.num_ranks)
        if simulation.options:
            simulation.options.faults.check_ranks(simulation.num_ranks)
    except ValueError as error:
        raise SetupError(str(error)) from None


def simulate_in_child(spec: Spec, simulation: SimulationSpec, folder: WorldFolder) -> bytes:
    """Run the requested simulation in this process; return its encoded outcome.

    Raises:
        TypeError: A result cannot be pickled.
    """
    gc.unfreeze()  # sim.simulate freezes objects itself; counting frozen ones takes it 20 ms
    running = _shared_words(folder.running, 1 + simulation.num_ranks)
    options = simulation.options or sim.Options()
    try:
        simulated = sim.simulate(
            partial(_on_device, spec, options.semantics),
            simulation.num_ranks,
            cluster=simulation.cluster,
            # Reports leave out the frames of this folder, too.
            options=replace(options, given=(*options.given, str(Path(__file__).parent))),
            running=running,
        )
    except sim.SimulationError as error:
        return of_error(error)
    return of_simulation(
        simulated, wants_trace=simulation.wants_trace, plain_results=spec.plain_results
    )


def _on_device(spec: Spec, semantics: str) -> object:
    """Run the program as one rank.

    With gloo's semantics it is on the CPU, because that is where simulated GPUs compute. Each rank
    unpickles its own copy of the arguments and of the globals of the caller's script.
    """
    fn, args = spec.function_and_arguments()
    has_gpus = semantics == "nccl"
    device = f"cuda:{os.environ['LOCAL_RANK']}" if has_gpus else "cpu"
    if has_gpus:  # in the other worlds, the group is made with a device_id
        group: Any = dist.group.WORLD
        group.bound = int(os.environ["LOCAL_RANK"])
    with world.on_device(torch.device(device)):
        return _run_program(fn, args)


def _run_program(fn: Callable[..., object], args: Sequence[object]) -> object:
    """Call the program; the simulator recognises this frame by its name."""
    return fn(*args)


def given_of(simulation: SimulationSpec) -> tuple[str, ...]:
    """Return the folders of the caller's own machinery; reports never point to lines in them."""
    return simulation.options.given if simulation.options else ()


def _shared_words(path: Path, count: int) -> memoryview:
    """Map a file of integers that the parent can read no matter what this process is doing."""
    path.write_bytes(bytes(WORD_BYTES * count))
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")


def read_outcome(
    process: RankProcess,
    simulation: SimulationSpec,
    folder: WorldFolder,
    *,
    exceeded: Exceeded | None,
    plain_results: bool,
) -> object:
    """Return the outcome that the simulation sent, or a LaunchError that says what ended it.

    Args:
        process: Process of the simulation.
        simulation: Requested simulation.
        folder: Folder of the world.
        exceeded: Limit that ended the world, or None.
        plain_results: True to accept plain data only.
    """
    if process.has_returned and process.report:
        try:
            return read(process.report.result, simulation, plain_results=plain_results)
        except plain.NotPlainError as error:
            return RankFailed(f"a simulated rank returned {error}")
    return _lost_simulation(process, simulation, folder, exceeded)


def _running(folder: WorldFolder, num_ranks: int) -> tuple[int, int | None]:
    """Return the rank that ran last and its thread id; rank 0 and None if they are unknown."""
    words = folder.read_running()
    if len(words) != 1 + num_ranks or not 0 <= words[0] < num_ranks:
        return 0, None
    return words[0], words[1 + words[0]]


def _others(number: int, folder: WorldFolder, given: Sequence[str]) -> str:
    """Return lines that say where the other ranks are, except those that have ended."""
    dump, by_place = folder.read_stacks(0), dict[str, list[int]]()
    for rank, ident in enumerate(folder.read_running()[1:]):
        place = stacks.read_place(dump, ident, given) if ident else stacks.Place("", None)
        waits = "waits " if place.operation else ""
        if rank != number and place.frame:
            by_place.setdefault(f"{waits}{place}", []).append(rank)
    lines = [f"  {rank_names(ranks):<16}  {place}" for place, ranks in by_place.items()]
    return "\n".join(["", "The other ranks:", *lines]) if lines else ""


def _lost_simulation(
    process: RankProcess, simulation: SimulationSpec, folder: WorldFolder, exceeded: Exceeded | None
) -> LaunchError:
    """Return the error for a simulation that crashed, exited or hung; it names the running rank."""
    number, ident = _running(folder, simulation.num_ranks)
    place = stacks.read_place(folder.read_stacks(0), ident, given_of(simulation))
    who = f"simulated rank {number} of {simulation.num_ranks}"
    if exceeded and process.was_stopped and not process.exceeded_memory:
        source = f"\n  {place.frame}  {place.frame.source}" if place.frame else ""
        is_suspended = process.place == stacks.SUSPENDED
        if is_suspended:
            place = stacks.SUSPENDED
        kind = verdict.hang_kind(
            exceeded, has_place=bool(place.frame), all_wait=False, is_suspended=is_suspended
        )
        message = f"time is up after {exceeded}: {who} is {place}{source}"
        others = _others(number, folder, given_of(simulation))
        return RankHung(f"{message}{others}", kind=kind, rank=number)
    if process.report:
        return RankFailed(f"{process.report.headline}\n\n{process.report.traceback}".rstrip())
    process.place = None  # was the place of the main thread, which only waits for ranks
    error, headline = verdict.cause(process)
    where = f" {place}" if place.frame else ""
    return error(f"{who} was running when its process {headline}{where}", rank=number)


ROWS = "_rows"  # key under which a trace's state holds its events
REPEATED = [Event._fields.index(name) for name in ("kind", "name", "site")]

_KINDS = {kind.__name__: kind for kind in (RankFailed, RankHung, RankExited, RankOutOfMemory)}
_KIND_OF: dict[type, str] = {sim.Deadlock: "deadlock", sim.Mismatch: "mismatch"}
_BY_EXCEPTION = {"OutOfMemory": RankOutOfMemory, "SystemExit": RankExited, EXIT: RankExited}


def of_simulation(
    simulated: "sim.Simulated[Any]", *, wants_trace: bool, plain_results: bool
) -> bytes:
    """Encode the outcome of a simulation.

    Raises:
        TypeError: A result cannot be pickled.
    """
    outcome = {
        "results": _encoded(simulated.results, plain_results=plain_results),
        "seconds": simulated.seconds,
        "flops": simulated.flops,
        "trace": _packed(simulated.trace.state()) if wants_trace else None,
        "gpu_time": simulated.gpu_time.state() if simulated.gpu_time else None,
    }
    return plain.dumps(outcome)


def _packed(state: dict[str, Any]) -> dict[str, Any]:
    """Turn a trace's rows into columns, which are smaller; store repeated values only once."""
    columns = [list(column) for column in zip(*state[ROWS], strict=True)]
    tables = []
    for place in REPEATED if columns else ():
        numbers = {value: number for number, value in enumerate(dict.fromkeys(columns[place]))}
        columns[place] = [numbers[value] for value in columns[place]]
        tables.append(list(numbers))
    return {**state, ROWS: columns, "tables": tables}


def _unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """Undo ``_packed``."""
    columns = state[ROWS]
    for place, table in zip(REPEATED, state.pop("tables"), strict=False):
        columns[place] = [table[number] for number in columns[place]]
    return {**state, ROWS: list(zip(*columns, strict=True))}


def _encoded(results: list[Any], *, plain_results: bool) -> list[bytes]:
    sent = []
    for rank, result in enumerate(results):
        try:
            sent.append(encoded(result, plain_results=plain_results))
        except TypeError as error:
            raise TypeError(f"rank {rank}: {error}") from None
    return sent


def of_error(error: sim.SimulationError) -> bytes:
    """Encode a simulation's error as the LaunchError that another world would raise."""
    kind: type[LaunchError] = RankHung if isinstance(error, sim.Deadlock) else RankFailed
    exception = error.exception if isinstance(error, sim.RankError) else ""
    outcome = {
        "error": _BY_EXCEPTION.get(exception, kind).__name__,
        "kind": _KIND_OF.get(type(error), ""),
        "message": str(error),
        "rank": error.ranks[0] if len(error.ranks) == 1 else None,
        "exception": "" if exception == EXIT else exception,
        "advice": error.advice if isinstance(error, sim.Deadlock) else "",
    }
    return plain.dumps(outcome)


def read(sent: bytes, simulation: SimulationSpec, *, plain_results: bool) -> object:
    """Decode what a simulation sent: its results, with the trace if requested, or its LaunchError.

    Raises:
        NotPlainError: The data is not a simulation's report, or a result had to be plain data and
            was not.
    """
    try:
        values: Any = plain.loads(sent)
        return (
            _error(values) if "error" in values else _simulated(values, simulation, plain_results)
        )
    except RankFailed as error:
        return error
    except plain.NotPlainError:
        raise
    except Exception as error:  # malformed data may raise any exception
        raise plain.NotPlainError(f"no simulation ({error})") from None


def _error(values: dict[str, Any]) -> LaunchError:
    rank = None if values["rank"] is None else int(values["rank"])
    return _KINDS[values["error"]](
        str(values["message"])[:MAX_TEXT],
        kind=str(values["kind"]),
        rank=rank,
        exception=str(values["exception"]),
        advice=str(values["advice"])[:MAX_TEXT],
    )


def _simulated(values: dict[str, Any], simulation: SimulationSpec, plain_results: bool) -> object:
    results = decoded(values["results"], plain_results=plain_results)
    if not simulation.wants_trace:
        return results
    return sim.Simulated(
        results,
        sim.Trace.of_state(_unpacked(values["trace"])),
        float(values["seconds"]),
        sim.choose_cluster(simulation.cluster, simulation.num_ranks),
        simulation.options or sim.Options(),
        [int(flops) for flops in values["flops"]],
        gpu_time=GpuTime.of_state(values["gpu_time"]) if values["gpu_time"] else None,
    )
