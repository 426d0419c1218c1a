"""Errors of a world that fails: a rank's exception, or a report of a standstill.

The first error is the one to report. After a rank has raised an exception, its clean-up may make
calls that other ranks mistake for its next ones, which leads to a deadlock or a mismatch. The cause
is still the exception.
"""

import re
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import FrameType
from typing import Any

from distlab.sim.device.memory import OutOfMemory
from distlab.sim.engine.scheduler import Rank, Strand
from distlab.sim.messages.mailbox import Mailbox
from distlab.sim.messages.pending import Pending
from distlab.sim.messages.thread_wait import ThreadWait
from distlab.sim.postmortem import rows
from distlab.sim.postmortem.deadlock import explain
from distlab.sim.postmortem.handlers import exceptions_of, handler_around, raises
from distlab.sim.postmortem.standstill import History, Standstill
from distlab.sim.reporting.errors import EXIT, RankError, SimulationError
from distlab.sim.reporting.report import Row, place, shorten, table
from distlab.sim.reporting.sites import PROGRAM, SIMULATOR, Places, Site
from distlab.util import tracebacks


def standstill_error(
    ranks: Sequence[Rank],
    places: Places,
    mailbox: Mailbox,
    history: History,
) -> SimulationError:
    """Return the error for a world in which no rank can continue.

    Args:
        mailbox: Mailbox with all unmatched sends and recvs.
    """
    blocked = {rank.number: waiting(rank) for rank in ranks if not rank.has_left}
    firsts = {number: strands[0] for number, strands in blocked.items() if strands}
    frames = sys._current_frames()
    still = Standstill(
        {number: strand.waits_in for number, strand in firsts.items()},
        ended=[rank.number for rank in ranks if rank.has_left],
        killed=[rank.number for rank in ranks if rank.is_killed],
        unmatched=mailbox.unmatched(),
        queued=mailbox.waiting(),
        history=history,
        waits_at={number: waits_at(strand, places, frames) for number, strand in firsts.items()},
        beside=[strand.waits_in for strands in blocked.values() for strand in strands[1:]],
    )
    return first_error(explain(still), ranks, places)


def first_error(report: SimulationError, ranks: Sequence[Rank], places: Places) -> SimulationError:
    """Return an exception that was propagating when ``report`` was made, or else ``report``."""
    under_way = {
        rank: report.__context__ if error is report else error
        for rank, error in exceptions_of(ranks)
    }
    for error in under_way.values():
        if isinstance(error, SimulationError):
            report = error
            break
    for rank, error in under_way.items():
        if not isinstance(error, Exception) or isinstance(error, SimulationError):
            continue
        if _is_passed_on(error):
            afterwards = f"Meanwhile, the world ended:\n{report}"
            return rank_error(rank, len(ranks), error, places, afterwards)
    return report


def _is_passed_on(error: Exception) -> bool:
    """Return whether an exception is only passing through a ``finally`` or ``with``.

    If it is inside an ``except`` that raises nothing, the program has handled it, for example with
    a fallback.
    """
    if error.__traceback__ is None:
        return False
    frame = error.__traceback__.tb_frame  # the outermost frame that it has reached
    handler = handler_around((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
    return handler is None or raises(handler)


TRACEBACK = "Traceback (most recent call last):\n"
OTHERS = "The other ranks:"
LONG = 300  # characters; the traceback does not repeat a longer message


def rank_error(
    rank: int, num_ranks: int, error: BaseException, places: Places, others: str = ""
) -> RankError:
    """Return the error for a rank that raised ``error``, with a traceback of the program's lines.

    Args:
        others: Report on the other ranks, shown below the traceback.
    """
    shown = traceback.TracebackException.from_exception(error)
    tracebacks.keep_frames(shown, partial(_of_program, places=places))
    headline = tracebacks.headline(error)
    text, stack = "".join(shown.format()), "".join([TRACEBACK, *shown.stack.format()])
    message = "".join(shown.format_exception_only())
    if len(message) > LONG:  # the headline has it
        text = text.removesuffix(message)
    if isinstance(error, OutOfMemory):  # its message is a whole report: print it only once
        headline, text = f"OutOfMemory: {error}", stack
    if any(_FRAME.match(line) for line in headline.splitlines()):  # of a process or a callback
        headline, text = _without_frames(headline, places), stack
    if isinstance(error, SystemExit):  # the program ended itself, so no traceback is needed
        headline, text = f"{headline}, {place(places.raised_at(error))}", ""
    headline = f"rank {rank} of {num_ranks} raised {headline}"
    parts = filter(None, (headline, text.rstrip(), others))
    return RankError("\n\n".join(parts), (rank,), type(error).__name__)


# A frame in a message: of a traceback, or below torch's "At:".
_FRAME = re.compile(
    r'^  (?:File "(?P<file>.+)", line \d+, in .+|(?P<at>\S.*\.py|cell \d+)\(\d+\): \S+)$'
)


def _without_frames(text: str, places: Places) -> str:
    """Return a message with frames of the program alone, and each line of tracebacks once."""
    lines, is_shown = list[str](), True
    for line in text.splitlines():
        if frame := _FRAME.match(line):
            is_shown = places.kind(frame["file"] or frame["at"]) == PROGRAM
        elif not line.startswith("    "):  # not a frame's source
            is_shown = True
        if is_shown:
            lines.append(line)
    shown = [
        line
        for line, after in pairwise([*lines, ""])
        if TRACEBACK.strip() not in line or after.startswith(" ")  # a title without its frames
    ]
    return "\n".join(dict.fromkeys(shown) if TRACEBACK.strip() in text else shown)


def exit_error(rank: int, num_ranks: int, cause: str, site: Site, others: str) -> RankError:
    """Return the error for a rank that has called ``os._exit``, or killed itself by a signal."""
    headline = f"rank {rank} of {num_ranks} ended by {cause}, {place(site)}"
    return RankError("\n\n".join(filter(None, (headline, others))), (rank,), EXIT)


def doing_of_others(
    failed: Collection[int],
    ranks: Sequence[Rank],
    places: Places,
    history: History,
    raised: Mapping[int, BaseException],
) -> str:
    """Return where ranks other than ``failed`` wait, or how they ended; "" if all are running.

    Args:
        raised: What ranks have raised so far, by rank.
    """
    frames, over = sys._current_frames(), {*failed, *raised}
    blocked = {
        other.number: strands[0]
        for other in ranks
        if not (other.number in over or other.has_left) and (strands := waiting(other))
    }
    calls = [
        (rows.row_of(strand.waits_in, waits_at(strand, places, frames)), strand.waits_in)
        for strand in blocked.values()
    ]
    ended = [other.number for other in ranks if other.has_left and other.number not in failed]
    killed = [other.number for other in ranks if other.is_killed]
    ends = rows.ends(Standstill({}, ended, killed, history))
    too = rows.alike(
        Row((rank,), f"raised {type(error).__name__}", place(places.raised_at(error)))
        for rank, error in raised.items()
        if rank not in failed
    )
    lines = [*rows.fitting(calls, rows.MAX_ROWS), *ends, *too]
    known = {*blocked, *ended, *killed, *over}
    running = [other for other in ranks if other.number not in known and other.ident in frames]
    if lines or any(ranks[number].is_late for number in failed):
        lines += rows.alike(_running(other, places, frames) for other in running)
    return "\n".join([OTHERS, *table(lines)]) if lines else ""


def places_of_others(interrupted: int, ranks: Sequence[Rank], places: Places) -> str:
    """Return where ranks are that an interrupt ends while another one runs; "" if there are none.

    That one runs on meanwhile, so ranks may begin or end waits; their operations are left out.
    """
    frames = sys._current_frames()
    others = [r for r in ranks if r.number != interrupted and not r.has_ended and r.ident in frames]
    lines = rows.alike(_running(other, places, frames) for other in others)
    return "\n".join([OTHERS, *table(shorten(lines, rows.MAX_ROWS))]) if lines else ""


def _running(rank: Rank, places: Places, frames: Mapping[int, FrameType]) -> Row:
    """Return a row for a running rank, with the line that it has reached, if known."""
    site = waits_at(rank, places, frames)
    return (
        Row((rank.number,), "running" if rank.waits_in is None else "waiting", place(site))
        if site[0]
        else Row((rank.number,), "not begun", "")
    )


def _of_program(files: Collection[str], places: Places) -> Collection[str]:
    """Return the files that belong to the program or, if none does, all but the simulator's."""
    kinds = {file: places.kind(file) for file in files}
    has_program = PROGRAM in kinds.values()
    return [
        f for f, kind in kinds.items() if (kind == PROGRAM if has_program else kind != SIMULATOR)
    ]


def waits_at(strand: Strand, places: Places, frames: Mapping[int, FrameType]) -> Site:
    """Return the line of the program on which a thread waits."""
    return places.call_site(frames[strand.ident], strand.ident)[0]


def waiting(rank: Rank) -> list[Any]:
    """Return a rank's blocked threads; those that wait for other ranks come first."""
    blocked = [strand for strand in rank.strands if isinstance(strand.waits_in, Pending)]
    return sorted(blocked, key=lambda strand: isinstance(strand.waits_in, ThreadWait))
