"""Time limits in virtual time: the meaning of ``timeout=``, and the errors for timeouts.

The text of each error begins like that of torch's own error on gloo. If the operation that timed
out is known, the error then names it.
"""

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.constants import default_pg_timeout

from distlab.sim.engine.scheduler import NEVER


def limit_s(timeout: timedelta | float | None) -> float:
    """Return a timeout in seconds; NEVER for None or 0, which both mean no limit in torch."""
    return seconds_of(timeout) if timeout else NEVER


def seconds_of(timeout: timedelta | float) -> float:
    """Return a timeout in seconds; like torch, accept a plain number of seconds as well."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout


def group_limit_s(timeout: timedelta | None) -> float:
    """Return a group's limit; NEVER for torch's default, since deadlocks are detected anyway."""
    return NEVER if timeout == default_pg_timeout else limit_s(timeout)


def milliseconds(seconds: float) -> str:
    """Return a time in whole milliseconds, such as ``1500``."""
    return f"{round(seconds * 1000)}"


def operation_error(rank: int, name: str, seconds: float, waited_for: str) -> RuntimeError:
    """Return the error for a message or a collective that failed because it took too long."""
    return RuntimeError(
        f"[rank {rank}] Timed out waiting {milliseconds(seconds)}ms for {name} operation to "
        f"complete: {waited_for}"
    )


def patience_error(rank: int, seconds: float, waited_for: str) -> RuntimeError:
    """Return the error for a rank that stops waiting for a collective; the collective continues."""
    return RuntimeError(
        f"[rank {rank}] Operation timed out! After {milliseconds(seconds)}ms: {waited_for}"
    )


def store_error(keys: list[str], seconds: float) -> DistStoreError:
    """Return the error for keys that no rank set in time."""
    return DistStoreError(f"wait timeout after {milliseconds(seconds)}ms, keys: {', '.join(keys)}")


def aborted_error() -> RuntimeError:
    """Return the error for an operation that other ranks had yet to join when an error came."""
    return RuntimeError(
        "aborted: an earlier run failed before the other ranks had done their part of this "
        "operation. Call it again, on all of its ranks"
    )


def closed_error(rank: int, gave_up: int, waited_for: str = "") -> RuntimeError:
    """Return the error for a connection that was closed because an operation timed out.

    Args:
        rank: Rank on which the error is raised.
        gave_up: Rank whose operation timed out.
        waited_for: Description of that operation and the line that called it; "" if unknown.
    """
    waited = f" in its {waited_for}" if waited_for else ""
    if rank == gave_up:
        waited = waited and f": it had waited long enough{waited}"
        return RuntimeError(f"[rank {rank}] Application timeout caused pair closure{waited}")
    return RuntimeError(
        f"[rank {rank}] Connection closed by peer: rank {gave_up} had waited long enough{waited}"
    )


def missing_error(missing: Sequence[int], seconds: float) -> RuntimeError:
    """Return a monitored barrier's error on rank 0 of the group.

    Args:
        missing: Ranks that have not arrived, numbered inside the group.
        seconds: Time that rank 0 waited.
    """
    if not seconds:
        return RuntimeError("Rank 0 timed out in monitoredBarrier after 0 ms.")
    ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return RuntimeError(
        f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {milliseconds(seconds)} ms"
    )


def unmonitored_error(rank: int) -> RuntimeError:
    """Return a monitored barrier's error on a rank that arrived; ``rank`` is its group rank."""
    return RuntimeError(
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
        "send/recv from rank 0. Please check rank 0 logs for faulty rank."
    )
