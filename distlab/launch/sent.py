"""What the process of a simulated world sends to the one that asked for it: plain data.

    {"results": pickle of a list, "seconds": …, "flops": […], "trace": {…} or None}
    {"error": "RankHung", "message": …, "rank": … or None, "exception": …}

The results are pickled on their own: whether they may hold more than plain data, the reader says.
"""

import pickle
from typing import Any

from distlab import sim
from distlab.launch import plain
from distlab.launch.accounts import pickled_result
from distlab.launch.errors import LaunchError, RankExited, RankFailed, RankHung, RankOutOfMemory
from distlab.launch.protocol import SimulationSpec

_KINDS = {kind.__name__: kind for kind in (RankFailed, RankHung, RankExited, RankOutOfMemory)}
_BY_EXCEPTION = {"OutOfMemory": RankOutOfMemory, "SystemExit": RankExited}


def of_simulation(simulated: "sim.Simulated[Any]", *, wants_trace: bool) -> dict[str, object]:
    """Pack what a simulation gave.

    Raises:
        TypeError: a result cannot be pickled.
    """
    return {
        "results": pickled_result(simulated.results),
        "seconds": simulated.seconds,
        "flops": simulated.flops,
        "trace": simulated.trace.state() if wants_trace else None,
    }


def of_error(error: sim.SimulationError) -> dict[str, object]:
    """Pack the error that ended a simulation, as one of all worlds."""
    kind: type[LaunchError] = RankHung if isinstance(error, sim.Deadlock) else RankFailed
    exception = error.exception if isinstance(error, sim.RankError) else ""
    return {
        "error": _BY_EXCEPTION.get(exception, kind).__name__,
        "message": str(error),
        "rank": error.ranks[0] if len(error.ranks) == 1 else None,
        "exception": exception,
    }


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
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, plain.NotPlainError):
            raise
        raise plain.NotPlainError(f"no simulation ({error})") from None


def _error(values: dict[str, Any]) -> LaunchError:
    rank = None if values["rank"] is None else int(values["rank"])
    return _KINDS[values["error"]](
        str(values["message"]), rank=rank, exception=str(values["exception"])
    )


def _simulated(values: dict[str, Any], simulation: SimulationSpec, plain_results: bool) -> object:
    load = plain.loads if plain_results else pickle.loads
    results: Any = load(values["results"])
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
