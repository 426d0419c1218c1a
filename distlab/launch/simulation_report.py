"""What the process of a simulated world sends to the one that asked for it: plain data.

    {"results": [pickle of each], "seconds": …, "flops": […], "trace": {…} or None}
    {"error": "RankHung", "kind": …, "message": …, "rank": … or None, "exception": …,
     "advice": …}

The results are pickled on their own: whether they may hold more than plain data, the reader says.
"""

import pickle
from typing import Any

from distlab import sim
from distlab.launch import safe_pickle
from distlab.launch.errors import LaunchError, RankExited, RankFailed, RankHung, RankOutOfMemory
from distlab.launch.protocol import MAX_TEXT, SimulationSpec
from distlab.launch.rank_report import pickled_result
from distlab.sim.reporting.errors import EXIT

_KINDS = {kind.__name__: kind for kind in (RankFailed, RankHung, RankExited, RankOutOfMemory)}
_KIND_OF: dict[type, str] = {sim.Deadlock: "deadlock", sim.Mismatch: "mismatch"}
_BY_EXCEPTION = {"OutOfMemory": RankOutOfMemory, "SystemExit": RankExited, EXIT: RankExited}


def of_simulation(
    simulated: "sim.Simulated[Any]", *, wants_trace: bool, max_bytes: int | None = None
) -> dict[str, object]:
    """Pack what a simulation gave.

    Raises:
        TypeError: a result cannot be pickled, or has more than ``max_bytes`` then.
    """
    return {
        "results": _pickled(simulated.results, max_bytes),
        "seconds": simulated.seconds,
        "flops": simulated.flops,
        "trace": simulated.trace.state() if wants_trace else None,
    }


def _pickled(results: list[Any], max_bytes: int | None) -> list[bytes]:
    pickled = []
    for rank, result in enumerate(results):
        try:
            pickled.append(pickled_result(result, max_bytes))
        except TypeError as error:
            raise TypeError(f"rank {rank}: {error}") from None
    return pickled


def of_error(error: sim.SimulationError) -> dict[str, object]:
    """Pack the error that ended a simulation, as one of all worlds."""
    kind: type[LaunchError] = RankHung if isinstance(error, sim.Deadlock) else RankFailed
    exception = error.exception if isinstance(error, sim.RankError) else ""
    return {
        "error": _BY_EXCEPTION.get(exception, kind).__name__,
        "kind": _KIND_OF.get(type(error), ""),
        "message": str(error),
        "rank": error.ranks[0] if len(error.ranks) == 1 else None,
        "exception": "" if exception == EXIT else exception,
        "advice": error.advice if isinstance(error, sim.Deadlock) else "",
    }


def read(sent: bytes, simulation: SimulationSpec, *, plain_results: bool) -> object:
    """Return the simulation, its results alone if no trace was asked for, or its LaunchError.

    Raises:
        NotPlainError: something else was sent than the above; or in a result, if these must be
            plain.
    """
    try:
        values: Any = safe_pickle.loads(sent)
        return (
            _error(values) if "error" in values else _simulated(values, simulation, plain_results)
        )
    except RankFailed as error:
        return error
    except safe_pickle.NotPlainError:
        raise
    except Exception as error:  # whatever what was sent may lead to
        raise safe_pickle.NotPlainError(f"no simulation ({error})") from None


def _own_results(pickled: list[bytes]) -> list[Any]:
    return [pickle.loads(result) for result in pickled]


def _plain_results(pickled: list[bytes]) -> list[Any]:
    results = []
    for rank, result in enumerate(pickled):
        try:
            results.append(safe_pickle.loads_result(result))
        except safe_pickle.NotPlainError as error:
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
        sim.Trace.of_state(values["trace"]),
        float(values["seconds"]),
        sim.choose_cluster(simulation.cluster, simulation.num_ranks),
        simulation.options or sim.Options(),
        [int(flops) for flops in values["flops"]],
    )
