"""What the process of a simulated world sends to the one that asked for it: plain data.

    {"results": [pickle of each], "seconds": …, "flops": […], "trace": {…} or None}
    {"error": "RankHung", "kind": …, "message": …, "rank": … or None, "exception": …,
     "advice": …}

The results are pickled on their own: whether they may hold more than plain data, the reader says.
"""

import pickle
from typing import Any

from distlab import sim
from distlab.launch import plain, rank_report
from distlab.launch.errors import LaunchError, RankExited, RankFailed, RankHung, RankOutOfMemory
from distlab.launch.protocol import MAX_TEXT, SimulationSpec
from distlab.sim.engine.trace import Event
from distlab.sim.reporting.errors import EXIT

ROWS = "_rows"  # the events in a trace's state
REPEATED = [Event._fields.index(name) for name in ("kind", "name", "site")]

_KINDS = {kind.__name__: kind for kind in (RankFailed, RankHung, RankExited, RankOutOfMemory)}
_KIND_OF: dict[type, str] = {sim.Deadlock: "deadlock", sim.Mismatch: "mismatch"}
_BY_EXCEPTION = {"OutOfMemory": RankOutOfMemory, "SystemExit": RankExited, EXIT: RankExited}


def of_simulation(
    simulated: "sim.Simulated[Any]", *, wants_trace: bool, plain_results: bool
) -> bytes:
    """Pack what a simulation gave.

    Raises:
        TypeError: A result cannot be pickled.
    """
    outcome = {
        "results": _encoded(simulated.results, plain_results=plain_results),
        "seconds": simulated.seconds,
        "flops": simulated.flops,
        "trace": _packed(simulated.trace.state()) if wants_trace else None,
    }
    return plain.dumps(outcome)


def _packed(state: dict[str, Any]) -> dict[str, Any]:
    """Turn the rows of a trace, of which there are many, into columns; names and sites repeat."""
    columns = [list(column) for column in zip(*state[ROWS], strict=True)]
    tables = []
    for place in REPEATED if columns else ():
        numbers = {value: number for number, value in enumerate(dict.fromkeys(columns[place]))}
        columns[place] = [numbers[value] for value in columns[place]]
        tables.append(list(numbers))
    return {**state, ROWS: columns, "tables": tables}


def _unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """Return what ``_packed`` was given."""
    columns = state[ROWS]
    for place, table in zip(REPEATED, state.pop("tables"), strict=False):
        columns[place] = [table[number] for number in columns[place]]
    return {**state, ROWS: list(zip(*columns, strict=True))}


def _encoded(results: list[Any], *, plain_results: bool) -> list[bytes]:
    encoded = []
    for rank, result in enumerate(results):
        try:
            encoded.append(rank_report.encoded(result, plain_results=plain_results))
        except TypeError as error:
            raise TypeError(f"rank {rank}: {error}") from None
    return encoded


def of_error(error: sim.SimulationError) -> bytes:
    """Pack the error that ended a simulation, as one of all worlds."""
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
    """Return the simulation, its results alone if no trace was asked for, or its LaunchError.

    Raises:
        NotPlainError: something else was sent than the above; or in a result, if these must be
            plain.
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
    except Exception as error:  # whatever what was sent may lead to
        raise plain.NotPlainError(f"no simulation ({error})") from None


def _own_results(pickled: list[bytes]) -> list[Any]:
    return [pickle.loads(result) for result in pickled]


def _plain_results(pickled: list[bytes]) -> list[Any]:
    results = []
    for rank, result in enumerate(pickled):
        try:
            results.append(plain.loads_result(result))
        except plain.NotPlainError as error:
            who = f"rank {rank} of {len(pickled)}"
            raise RankFailed(f"{who} returned {error}", rank=rank) from None
    return results


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
    load = _plain_results if plain_results else _own_results
    results = load(values["results"])
    if not simulation.wants_trace:
        return results
    return sim.Simulated(
        results,
        sim.Trace.of_state(_unpacked(values["trace"])),
        float(values["seconds"]),
        sim.choose_cluster(simulation.cluster, simulation.num_ranks),
        simulation.options or sim.Options(),
        [int(flops) for flops in values["flops"]],
    )
