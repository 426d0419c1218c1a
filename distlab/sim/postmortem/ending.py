"""How a world ends if it fails: with the error of a rank, or with a report of who waits for whom.

What comes first counts. When a rank has raised, the calls of its clean-up may meet ranks that wait
for what it would have done next, and then they deadlock or disagree. The cause is what it raised.
"""

import sys
from collections.abc import Sequence

from distlab.sim.engine.scheduler import Rank
from distlab.sim.messages.mailbox import Mailbox
from distlab.sim.postmortem import caught, raised
from distlab.sim.postmortem.deadlock import History, explain
from distlab.sim.postmortem.handlers import handler_around, raises
from distlab.sim.reporting.errors import SimulationError
from distlab.sim.reporting.sites import Places


def standstill_error(
    ranks: Sequence[Rank],
    places: Places,
    mailbox: Mailbox,
    history: History,
) -> SimulationError:
    """Make the error for a world in which no rank can go on.

    Args:
        ranks: all of the world.
        places: tell the program's lines.
        history: what they did before.
        mailbox: has all sends and recvs that were posted and have not met.
    """
    waiting = {rank.number: raised.waiting(rank) for rank in ranks}
    firsts = {number: strands[0] for number, strands in waiting.items() if strands}
    frames = sys._current_frames()
    report = explain(
        {number: strand.waits_in for number, strand in firsts.items()},
        ended=[rank.number for rank in ranks if rank.has_left],
        killed=[rank.number for rank in ranks if rank.is_killed],
        unmatched=mailbox.unmatched(),
        queued=mailbox.waiting(),
        history=history,
        waits_at={
            number: raised.waits_at(strand, places, frames) for number, strand in firsts.items()
        },
        beside=[strand.waits_in for strands in waiting.values() for strand in strands[1:]],
    )
    return first_error(report, ranks, places)


def first_error(report: SimulationError, ranks: Sequence[Rank], places: Places) -> SimulationError:
    """Return the exception that a rank was passing on when ``report`` was made, or ``report``."""
    under_way = {
        rank: report.__context__ if error is report else error
        for rank, error in caught.exceptions_of(ranks)
    }
    for error in under_way.values():
        if isinstance(error, SimulationError):
            report = error
            break
    for rank, error in under_way.items():
        if not isinstance(error, Exception) or isinstance(error, SimulationError):
            continue
        if _is_passed_on(error):
            afterwards = f"While it cleaned up, the world ended:\n{report}"
            return raised.rank_error(rank, len(ranks), error, places, afterwards)
    return report


def _is_passed_on(error: Exception) -> bool:
    """Whether an exception goes on from where it has come to: a ``finally``, a ``with``.

    An ``except`` that raises nothing has dealt with it: that is how fallbacks are written.
    """
    if error.__traceback__ is None:
        return False
    frame = error.__traceback__.tb_frame  # the outermost that it has come to
    handler = handler_around((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
    return handler is None or raises(handler)
