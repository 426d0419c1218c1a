"""Exceptions that ranks have caught, or may have caught: who does so leaves out what comes next."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from distlab.sim.engine.scheduler import Rank
from distlab.sim.postmortem.handlers import DELIBERATE, handler_around, skipper_of
from distlab.sim.reporting.errors import Deadlock, Mismatch, SimulationError
from distlab.sim.reporting.report import WHO, behind, error_line, told_once
from distlab.sim.reporting.sites import PROGRAM, Exit, Places, Site
from distlab.util.text import rank_names

KINDS = ("peer ended", "missing rank", "order mismatch")  # of deadlocks: a call may be left out


def suspicions(
    error: SimulationError, ranks: Sequence[Rank], places: Places, exits: Mapping[int, Exit]
) -> Iterator[str]:
    """Ask which handler may have hidden an error of the ranks to blame, if nothing else says so.

    Args:
        error: the report.
        ranks: all of the world.
        places: tell the program's lines.
        exits: by rank, where it has left.
    """
    ends = {exits[rank].at for rank in error.ranks if rank in exits}  # few, also of many ranks
    if any(handler_around(site) for site in ends):
        return
    if isinstance(error, Mismatch) or (isinstance(error, Deadlock) and error.kind in KINDS):
        yield from _suspicions(error, ranks, places)


def handled(ranks: Sequence[Rank], places: Places) -> list[str]:
    """Say which exceptions ranks have caught, and still deal with."""
    return told_once(
        (
            rank,
            f"On {WHO}, an except deals with {error_line(error)}{behind(places.raised_at(error))}.",
        )
        for rank, error in exceptions_of(ranks)
        if not isinstance(error, SimulationError) and type(error).__name__ not in DELIBERATE
    )


def exceptions_of(ranks: Sequence[Rank]) -> Iterator[tuple[int, Exception]]:
    """Yield the exceptions that ranks have raised and are still handling, or passing on."""
    by_thread: Mapping[int, Any] = sys._current_exceptions()
    for rank in ranks:
        error = None if rank.has_ended else by_thread.get(rank.ident)
        if isinstance(error, tuple):  # Python 3.10 and 3.11: with its type and traceback
            error = error[1]
        if isinstance(error, Exception):
            yield rank.number, error


def _suspicions(error: SimulationError, ranks: Sequence[Rank], places: Places) -> Iterator[str]:
    blamed = set(error.ranks)
    frames = sys._current_frames()
    waiting = [rank for rank in ranks if not rank.has_ended and rank.ident in frames]
    others = [rank for rank in waiting if rank.number not in blamed] or waiting
    sites = dict.fromkeys(s for rank in others for s in _program_sites(frames[rank.ident], places))
    for site in sites:
        goes_on = any(other[::2] == site[::2] and other[1] > site[1] for other in sites)
        is_in_loop = isinstance(error, Mismatch) and not goes_on  # else it makes no more calls
        if skipper := skipper_of(site, is_in_loop=is_in_loop):
            who = rank_names(blamed) if len(blamed) < len(ranks) else "a rank"
            yield (
                f"The {skipper.word} of line {skipper.line} can hide an error: did {who} come "
                "through it, and so leave out a call?"
            )
            return


def _program_sites(frame: FrameType | None, places: Places) -> Iterator[Site]:
    while frame is not None:
        code = frame.f_code
        if places.kind(code.co_filename) == PROGRAM:
            yield code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
