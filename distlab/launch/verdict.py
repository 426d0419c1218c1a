"""Turn what is known about all ranks into one error: who is to blame, why, and what others did.

Blame goes to the first *primary* failure. The failure of a rank that only lost its connection is
secondary, even if it came first: it shows only that another rank went away.
"""

import os
import re
from collections.abc import Sequence

from distlab.launch import limits, stacks
from distlab.launch.errors import (
    LaunchError,
    RankCrashed,
    RankExited,
    RankFailed,
    RankFate,
    RankHung,
    RankOutOfMemory,
)
from distlab.launch.limits import Exceeded
from distlab.launch.protocol import CANNOT_REPORT, Outcome
from distlab.launch.rank import RankProcess
from distlab.util.text import clipped, rank_names, signal_name, verb, without_repeats

OUTPUT_LINES, OUTPUT_CHARACTERS = 20, 300
FATE_CHARACTERS = 120

# Messages that C++ code prints before it aborts -> their meaning here.
_HINTS = (
    (
        re.compile(r"op\.preamble\.length <= op\.nbytes|op\.nbytes == op\.preamble"),
        "gloo aborts a rank that is sent more bytes than it expects: two ranks called the same "
        "operation with different shapes or dtypes.",
    ),
)


def judge(ranks: Sequence[RankProcess], exceeded: Exceeded | None) -> LaunchError | None:
    """Return the one error of a world that has ended, or None if every rank returned.

    Args:
        ranks: All ranks of the world.
        exceeded: Limit that ended the world, or None.
    """
    if all(rank.has_returned for rank in ranks):
        return None
    primary = [rank for rank in ranks if rank.has_failed and not _is_secondary(rank)]
    if primary:
        return _failure(min(primary, key=_failed_at_ns), ranks)
    if exceeded:
        return _hang(ranks, exceeded)
    return _lost_peer(ranks)


def _failure(rank: RankProcess, ranks: Sequence[RankProcess]) -> LaunchError:
    """Return the error for a rank that failed on its own."""
    who = f"rank {rank.number} of {len(ranks)}"
    kind, headline = cause(rank)
    parts = [f"{who} {headline}"]
    if rank.report and rank.report.traceback and rank.report.outcome is not Outcome.EXIT:
        parts.append(rank.report.traceback.rstrip())
    elif rank.place and rank.place.frame:
        parts.append(f"  {rank.place.frame}  {rank.place.frame.source}")
    parts += [hint for pattern, hint in _HINTS if pattern.search(rank.text())]
    parts += [*_output(rank), *_others(rank, ranks)]
    exception = rank.report.exception if rank.report else ""
    return kind("\n\n".join(parts), rank=rank.number, fates=_fates(ranks), exception=exception)


def cause(rank: RankProcess) -> tuple[type[LaunchError], str]:
    """Return the error type, and the predicate of a sentence whose subject is the rank."""
    if rank.exceeded_memory:
        where = f" {rank.place}" if rank.place else ""
        return RankOutOfMemory, f"outgrew the memory limit{where}; it was stopped"
    if rank.report is not None:
        return {
            Outcome.OUT_OF_MEMORY: (RankOutOfMemory, f"ran out of memory: {rank.report.headline}"),
            Outcome.EXIT: (RankExited, f"left by {rank.report.headline} without a result"),
        }.get(rank.report.outcome, (RankFailed, f"raised {rank.report.headline}"))
    return _death(rank)


def _death(rank: RankProcess) -> tuple[type[LaunchError], str]:
    """Return the error type and the predicate for a rank that died without a report."""
    code = os.waitstatus_to_exitcode(rank.exit_status or 0)
    if code == CANNOT_REPORT:
        return RankFailed, "could not report how it ended; the last lines that it printed say why"
    if code >= 0:
        return RankExited, f"ended by os._exit({code}) without a result"
    name = signal_name(-code)
    if name == "SIGKILL":
        return RankCrashed, (
            "was killed by SIGKILL (the kernel if the machine ran out of memory, else a person)"
        )
    return RankCrashed, f"was killed by {name}" + (f" {rank.place}" if rank.place else "")


def _hang(ranks: Sequence[RankProcess], exceeded: Exceeded) -> RankHung:
    running = {rank.number: rank.place for rank in ranks if rank.place}
    busy = [
        number for number, place in running.items() if not place.operation and place != stacks.READY
    ]
    in_program = [number for number in busy if running[number].frame]
    returned = [rank.number for rank in ranks if rank.has_returned]
    to_blame = busy if busy else returned
    parts = [f"time is up after {exceeded}: {stacks.roll_call(running, len(ranks))}"]
    if returned:
        parts.append(f"{rank_names(returned)} {verb(returned, 'have', 'has')} returned")
    parts += _advice(exceeded, len(ranks), all_wait=not to_blame)
    blamed = to_blame[0] if len(to_blame) == 1 else None
    parts += _output(ranks[blamed]) if blamed is not None else []
    return RankHung(
        "\n".join(parts),
        kind=hang_kind(
            exceeded,
            has_place=bool(in_program),
            all_wait=not busy,
            is_suspended=stacks.SUSPENDED in running.values(),
        ),
        rank=blamed,
        fates=_fates(ranks),
    )


def _advice(exceeded: Exceeded, world_size: int, *, all_wait: bool) -> list[str]:
    if exceeded.limit == "start":
        return [limits.start_explained(world_size, limits.num_cores())]
    if not all_wait:
        return []
    return [
        "All of them wait for each other: compare the calls above, rank by rank. "
        "If they only need longer, raise the limit."
    ]


def hang_kind(exceeded: Exceeded, *, has_place: bool, all_wait: bool, is_suspended: bool) -> str:
    """Return the kind of a hang.

    Args:
        exceeded: Limit that ended the world.
        has_place: True if a line of the program was computing.
        all_wait: True if every rank that had not returned waited in communication.
        is_suspended: True if a rank was stopped by a signal.
    """
    if is_suspended and exceeded.limit != "computing":
        return "suspended"
    if all_wait:
        return "all wait"
    if exceeded.limit == "idle":
        return "blocked" if has_place else "all wait"
    return "endless loop" if has_place else RankHung.KIND


def _lost_peer(ranks: Sequence[RankProcess]) -> LaunchError:
    """Return the error if ranks only lost connections; blame a rank that returned, if any."""
    lost = min((rank for rank in ranks if rank.has_failed), key=_failed_at_ns)
    returned = [rank.number for rank in ranks if rank.has_returned]
    traceback = lost.report.traceback.rstrip() if lost.report else ""
    if not returned:
        return _failure(lost, ranks)
    have = verb(returned, "have", "has")
    message = (
        f"{rank_names(returned)} of {len(ranks)} {have} returned while rank {lost.number} "
        "still waited for an answer. Every rank must make the same collective calls, and each "
        "send needs its recv. Ranks that call the same collective with different sizes or dtypes "
        'can look like this too: the same run with backend="sim" says exactly which.\n\n'
        f"Where rank {lost.number} waited:\n{traceback}"
    )
    blamed = returned[0] if len(returned) == 1 else None
    return RankExited(message, kind="returned", rank=blamed, fates=_fates(ranks))


def _is_secondary(rank: RankProcess) -> bool:
    return rank.report is not None and rank.report.outcome is Outcome.SECONDARY


def _failed_at_ns(rank: RankProcess) -> int:
    return rank.report.at_ns if rank.report else rank.exited_at_ns


def _output(rank: RankProcess) -> list[str]:
    lines = without_repeats(rank.text()).rstrip().splitlines()[-OUTPUT_LINES:]
    shown = [f"  {clipped(line, OUTPUT_CHARACTERS)}" for line in lines]
    return ["\n".join([f"The last output of rank {rank.number}:", *shown])] if shown else []


def _others(rank: RankProcess, ranks: Sequence[RankProcess]) -> list[str]:
    others = [other for other in ranks if other is not rank]
    if not others:
        return []
    by_what: dict[str, list[int]] = {}
    for other in others:
        by_what.setdefault(_what(other), []).append(other.number)
    lines = [f"  {rank_names(numbers):<16}  {what}" for what, numbers in by_what.items()]
    return ["The other ranks:\n" + "\n".join(lines)]


def _fates(ranks: Sequence[RankProcess]) -> list[RankFate]:
    return [RankFate(rank.number, _what(rank), rank.text()) for rank in ranks]


def _what(rank: RankProcess) -> str:
    if rank.has_returned:
        return "returned"
    if _is_secondary(rank):
        return "failed because of it"
    if rank.was_stopped and rank.place:
        doing = "" if not rank.place.frame else "waiting " if rank.place.operation else "running "
        return f"stopped while {doing}{rank.place}"
    return clipped(cause(rank)[1].splitlines()[0], FATE_CHARACTERS)
