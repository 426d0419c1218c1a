"""What is left when all ranks have returned: what never met, and what nobody has waited for."""

from collections.abc import Iterable, Sequence

from distlab.sim.messages.handles import Handles
from distlab.sim.messages.pending import Pending
from distlab.sim.reporting.errors import Mismatch
from distlab.sim.reporting.report import mismatch, shorten, table

MAX_ROWS = 12


def never_met(operations: Sequence[Pending]) -> list[str]:
    """List what was posted and never matched; no rank waited for it, or the world would hang."""
    return table(shorten([operation.row() for operation in operations], MAX_ROWS))


def never_met_error(operations: Sequence[Pending]) -> Mismatch:
    """Make the error for them, of which there is one at least."""
    num = len(operations)
    count = "an operation was" if num == 1 else f"{num} operations were"
    return mismatch(
        "never met",
        f"{count} posted, but never matched",
        shorten([operation.row() for operation in operations], MAX_ROWS),
        "Every send needs a recv, every collective all ranks, and every request a wait().",
    )


def unwaited(handles: Handles, ranks: Iterable[int]) -> list[str]:
    """List the handles of these ranks that were never waited for."""
    return table(shorten(handles.rows(ranks), MAX_ROWS))
