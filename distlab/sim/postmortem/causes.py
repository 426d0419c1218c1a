"""The causes of a deadlock: the kind of mistake, the ranks to blame, and advice."""

from collections.abc import Sequence
from typing import NamedTuple

from distlab.sim.messages.group_names import DEFAULT
from distlab.sim.messages.meetings import Attendance, Founding
from distlab.sim.messages.message import Message
from distlab.sim.messages.store import KeyWait
from distlab.sim.messages.thread_wait import ThreadWait
from distlab.sim.postmortem import thread_waits, ways_out
from distlab.sim.postmortem.group_hints import wrong_group
from distlab.sim.postmortem.standstill import MAX_CLAUSES, Standstill, find_cycle
from distlab.sim.reporting.errors import DeadlockKind
from distlab.sim.reporting.torch_calls import advice_for, advice_if_ended
from distlab.util.text import lowered, rank_names, verb


class Cause(NamedTuple):
    """One reason why ranks cannot continue.

    Attributes:
        ranks: Ranks to blame.
        involved: Ranks that this cause blocks.
        words: Sentence that says which ranks wait for which.
        advice: Hints at what to look for in the program.
    """

    kind: DeadlockKind
    ranks: list[int]
    involved: list[int]
    words: str
    advice: str


KEY_ADVICE = (
    "Is the key spelled the same on both sides? Does the rank that should set it wait for "
    "something else first?"
)
MAX_CIRCLE = 12  # largest circle whose ranks are listed
FOUND_TOGETHER = "Every rank of a group has to call new_group for it"


def find_causes(still: Standstill) -> list[Cause]:
    """Return all causes that have to be fixed before every rank can continue."""
    knots = still.knots()
    waits = [wait for ranks in knots if isinstance(wait := still.blocked[ranks[0]], ThreadWait)]
    alone = [wait.rank for wait in waits]  # these ranks wait for no other rank
    return [
        *(_peer_ended(still, ranks) for ranks in still.deserted()),
        *map(_thread_wait, thread_waits.alike(waits)),
        *(_knot(still, ranks) for ranks in knots if ranks[0] not in alone),
    ]


def _knot(still: Standstill, ranks: list[int]) -> Cause:
    """Return the cause of a knot; it may be a lock that a communicating thread holds."""
    cause = _knot_of_calls(still, ranks)
    if by_torch := advice_for({rank: still.blocked[rank].maker for rank in ranks}):
        # The program cannot change the order of torch's own messages.
        is_cycle = cause.kind == "send/recv cycle"
        cause = cause._replace(advice=by_torch if is_cycle else f"{by_torch} {cause.advice}")
    for rank in cause.involved:
        words, advice = thread_waits.held_during(still.blocked[rank])
        if words:
            advice = f"{advice} If not: {lowered(cause.advice)}"
            return cause._replace(words=f"{cause.words}; {words}", advice=advice)
    return cause


def _knot_of_calls(still: Standstill, ranks: list[int]) -> Cause:
    waits = [still.blocked[rank] for rank in ranks]
    if any(isinstance(wait, KeyWait) for wait in waits):
        return _key_never_set(still, ranks)
    if all(isinstance(wait, Message) for wait in waits):
        return _send_recv_cycle(still, ranks)
    if all(isinstance(wait, Attendance) for wait in waits):
        return _order_mismatch(still, ranks)
    return _missing_rank(still, ranks)


def _peer_ended(still: Standstill, ranks: list[int]) -> Cause:
    """Blame the peers that have ended."""
    peers = still.waits_for[ranks[0]]
    ended = [peer for peer in peers if peer in still.ended]
    running = [peer for peer in peers if peer not in still.ended]
    words = f"{still.sentence(ranks)}, but {still.fates(ended)}"
    if running:
        words += f" ({still.sentences(running)})"
    if still.killed.isdisjoint(ended):
        hint = wrong_group(still, ranks, ranks)
        advice = _why_early(still, ranks, ended)
        advice = f"{hint} If not: {lowered(advice)}" if hint else advice
    else:
        advice = (
            "A killed rank never answers. The others need a heartbeat or a timeout to notice that, "
            "and a group without the killed rank to go on."
        )
    return Cause("peer ended", ended, ranks, words, advice)


def _why_early(still: Standstill, ranks: Sequence[int], ended: Sequence[int]) -> str:
    wait, who = still.blocked[ranks[0]], rank_names(ended)
    if {*ended} <= {*still.history.absent}:
        return ways_out.of_run_on_some(wait, ended)
    if isinstance(wait, Founding):
        return f"{FOUND_TOGETHER}, and {who} returned without doing so."
    if wait.maker:
        return advice_if_ended(wait.maker, ended)
    if isinstance(wait, Attendance):
        uneven = still.history.splits.uneven(wait.meeting.key, [*ranks, *ended])
        return uneven or (
            f"Why did {who} return before call {wait.meeting.number + 1} of this group? Fewer "
            "batches, a decision to stop that each rank makes alone, an early return, or a call "
            "under an `if` on the rank?"
        )
    missing, surplus = ("send", "receive") if wait.name == "recv" else ("recv", "send")
    return (
        f"Is a {missing} missing on {who}, or is there an early return (fewer batches, or a "
        f"decision to stop that each rank makes alone)? Or {verb(ranks, 'do', 'does')} "
        f"{rank_names(ranks)} {surplus} once too often?"
    )


def _key_never_set(still: Standstill, ranks: list[int]) -> Cause:
    """Blame the ranks that wait for the key, because the rank that should set it is unknown."""
    waiting = [rank for rank in ranks if isinstance(still.blocked[rank], KeyWait)]
    words = still.sentences([*waiting, *(rank for rank in ranks if rank not in waiting)])
    wait = still.blocked[waiting[0]]
    advice = wait.advice() if isinstance(wait, KeyWait) else ""
    return Cause("key never set", waiting, ranks, words, advice or KEY_ADVICE)


def _thread_wait(waits: Sequence[ThreadWait]) -> Cause:
    """Blame the ranks; each is blocked by its own threads, in the same way."""
    ranks = [wait.rank for wait in waits]
    words, advice = thread_waits.words(ranks, waits[0]), thread_waits.advice(waits[0])
    return Cause("thread wait", ranks, ranks, words, advice)


def _send_recv_cycle(still: Standstill, ranks: list[int]) -> Cause:
    """Blame all ranks of the cycle."""
    cycle = find_cycle({rank: still.waits_for[rank] for rank in ranks})
    is_whole = len(cycle) == len(ranks)
    words = still.circle([[rank] for rank in cycle]) if is_whole else still.sentences(ranks)
    return Cause("send/recv cycle", ranks, ranks, words, ways_out.of_cycle(still, ranks))


def _order_mismatch(still: Standstill, ranks: list[int]) -> Cause:
    """Blame all ranks that wait for each other."""
    cycle = find_cycle({rank: still.waits_for[rank] for rank in ranks})
    words = _axes_in_a_circle(still, cycle) or still.circle([still.mates[rank] for rank in cycle])
    if any(isinstance(still.blocked[rank], Founding) for rank in cycle):
        advice = f"{FOUND_TOGETHER}, at the same place among its other calls."
    else:
        advice = _crossed_groups(still, ranks, cycle)
    return Cause("order mismatch", ranks, ranks, words, advice)


def _axes_in_a_circle(still: Standstill, cycle: list[int]) -> str:
    """Describe a long cycle by the groups its ranks wait on; return "" for any other cycle."""
    names = still.group_names.sentence(still.blocked[rank] for rank in cycle)
    is_long = len(cycle) > MAX_CLAUSES and all(len(still.mates[rank]) == 1 for rank in cycle)
    if not names or not is_long or len(cycle) > MAX_CIRCLE:
        return ""
    return f"{lowered(names[:-1])}, each for the next of {', '.join(map(str, [*cycle, cycle[0]]))}"


def _crossed_groups(still: Standstill, ranks: list[int], cycle: list[int]) -> str:
    if {still.group_names.name(still.blocked[rank]) for rank in ranks} == {DEFAULT}:
        return (
            "Ranks have left the default group and called init_process_group again, but not all "
            "equally often: let all ranks do both."
        )
    rule = "Ranks that share several groups have to use them in the same order."
    names = still.group_names.sentence(still.blocked[rank] for rank in ranks)
    waits = "" if _axes_in_a_circle(still, cycle) or not names else f"{names}\n"
    if len({still.blocked[rank].title() for rank in cycle}) < len(cycle):
        return f"{waits}{rule} These are two different groups of the same ranks: check group=."
    hint = wrong_group(still, ranks, still.mates[cycle[0]])
    # If all calls are on one line, it may be a loop over groups.
    is_one_line = len({still.blocked[rank].site for rank in ranks}) == 1
    if hint and not is_one_line:
        return f"{hint} If not: {lowered(rule)}"
    if hint and not names:
        return f"{rule} Or else: {lowered(hint)}"
    return f"{waits}{rule} Or is one of these calls on the wrong group?"


def _missing_rank(still: Standstill, ranks: list[int]) -> Cause:
    """Blame the ranks missing from the collective that has the fewest missing ranks."""
    present = min(
        (rank for rank in ranks if isinstance(still.blocked[rank], Attendance)),
        key=lambda rank: (len(still.waits_for[rank]), rank),
    )
    missing = _directly_missing(still, present)
    words = f"{still.sentence(still.mates[present])}, but {still.sentences(missing)}"
    advice = (
        wrong_group(still, ranks, still.mates[present]),
        ways_out.of_absence(still, missing, present)
        or "Every rank of a group must make the same collective calls in the same order.",
        f"Or {verb(missing, 'do', 'does')} {rank_names(missing)} skip a call?",
    )
    return Cause("missing rank", missing, ranks, words, " ".join(filter(None, advice)))


def _directly_missing(still: Standstill, present: int) -> list[int]:
    """Return the absent ranks that wait for a present one; all absent ranks if none does."""
    absent = still.waits_for[present]
    there = set(still.blocked[present].group).difference(absent)
    direct = [
        rank
        for rank in absent
        if isinstance(still.blocked[rank], Message) and there.intersection(still.waits_for[rank])
    ]
    return direct or absent
