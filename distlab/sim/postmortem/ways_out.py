"""Advice on deadlocks caused by messages, depending on the ranks and calls involved."""

from collections.abc import Collection, Sequence

from distlab.sim.messages.message import Message
from distlab.sim.messages.pending import ANY_SOURCE, Pending
from distlab.sim.postmortem.standstill import Standstill
from distlab.util.text import counted, rank_names, verb

_TOGETHER = "give the send and the recv of each rank to batch_isend_irecv"
_ONE_BY_ONE = (
    "start the send with isend, receive, and only then wait for the send, or give both to "
    "batch_isend_irecv"
)


def of_cycle(still: Standstill, ranks: Sequence[int]) -> str:
    """Return advice on how ranks that wait for each other's messages can continue.

    If messages between two ranks run one at a time, as on NCCL, only a batch is sure to help.
    """
    if len(ranks) == 1:
        both = "in one batch_isend_irecv" if still.history.is_in_order else "posted before the wait"
        inside = (
            " If the peer is counted inside a group, give group=, and group_dst= or group_src= "
            "(group_peer= of P2POp): other arguments count all ranks of the world."
        )
        is_inside = len(still.history.groups) > 1
        return f"A message to oneself needs both ends, isend and irecv, {both}.{inside * is_inside}"
    names = {still.blocked[rank].name for rank in ranks}
    if still.history.is_in_order:
        return " ".join(filter(None, [_all_together(names), _counts(still, ranks)]))
    if len(names) == 2:
        return (
            "Find an order in which one of them can go first, or post everything with isend and "
            "irecv and wait afterwards."
        )
    advice = _all_send(ranks) if names == {"send"} else _all_receive(still, ranks)
    return " ".join(filter(None, [advice, _counts(still, ranks)]))


def _all_together(names: Collection[str]) -> str:
    if names == {"recv"}:
        return (
            "All of them wait to receive, and none has a send under way. If each has a send "
            f"further down, {_TOGETHER}. If not, a send is missing."
        )
    return f"None of them can go first: {_TOGETHER}."


def _all_send(ranks: Sequence[int]) -> str:
    if len(ranks) == 2:
        return (
            "Both wait in a send, which is done only when it is received. Let one of the two "
            f"receive before it sends, or {_TOGETHER}."
        )
    return (
        "All of them wait in a send, which is done only when it is received, and none gets as far "
        f"as a recv. On every rank, {_ONE_BY_ONE}."
    )


def _all_receive(still: Standstill, ranks: Sequence[int]) -> str:
    takers = [rank for rank in ranks if still.blocked[rank].peer == ANY_SOURCE]
    if len(takers) == 1:
        return (
            f"All of them wait to receive. Does rank {takers[0]}, which waits for any rank, "
            "receive once too often before it sends? If not, a send is missing."
        )
    if len(ranks) == 2:
        return (
            "Both wait to receive, and neither has a send under way. If each has a send further "
            f"down, let one of the two send first, or {_TOGETHER}; if not, a send is missing."
        )
    return (
        "All of them wait to receive, and none has a send under way. If each has a send further "
        f"down, on every rank {_ONE_BY_ONE}. If not, a send is missing."
    )


def _counts(still: Standstill, ranks: Sequence[int]) -> str:
    """Ask about a missing or extra message if more went one way than the other, else return ""."""
    if len(ranks) != 2:
        return ""
    arrived = still.history.arrived
    src, dst = max((ranks, ranks[::-1]), key=lambda ends: arrived.get((ends[0], ends[1]), 0))
    there, back = arrived.get((src, dst), 0), arrived.get((dst, src), 0)
    if there == back:
        return ""
    before = (
        f"Before, {counted(there, 'message')} went from rank {src} to rank {dst}, and "
        f"{back or 'none'} back:"
    )
    if still.blocked[src].name == "recv":
        return f"{before} is a send missing on rank {dst}?"
    return f"{before} should rank {src} receive now, or rank {dst} once more before it sends?"


def of_absence(still: Standstill, missing: Sequence[int], present: int) -> str:
    """Return why ranks do not reach the collective that blocks ``present``; "" if unknown.

    A rank cannot reach the collective if it waits for a message from a rank that is already in it.
    """
    call = still.blocked[present]
    for rank in missing:
        wait = still.blocked.get(rank)
        there = [peer for peer in still.waits_for.get(rank, ()) if peer not in missing]
        met = [peer for peer in there if peer in still.mates[present]]
        if not isinstance(wait, Message) or not met:
            continue
        who = f"Rank {rank} cannot go on until"
        they_wait = f"{rank_names(met)} {verb(met, 'wait')} for rank {rank} in this {call.name}"
        if wait.peer == ANY_SOURCE:
            question = f"does rank {rank} receive once too often?"
            return f"{who} some rank sends, and {they_wait}: {question}"
        acts, answers = ("send", "receive") if wait.name == "recv" else ("receive", "send")
        return (
            f"{who} {rank_names(met)} {acts}s, and {they_wait}. Let {rank_names(met)} {acts} "
            f"before the {call.name}, or let rank {rank} {answers} after it."
        )
    return ""


def of_run_on_some(wait: Pending, absent: Sequence[int]) -> str:
    """Return advice on a wait for ranks that do not take part in this run of a session."""
    who, message = rank_names(absent), _first_between(wait, absent)
    if message is None:
        return f"Run it on {who} as well, or wait in a later run that has all of them."
    if message.maker:
        return f"Let {who} do {verb(absent, 'their', 'its')} part in the same run."
    peer = who if len(absent) == 1 else f"one of {who}"
    answer = "send" if message.name == "recv" else "receive"
    return (
        f"Let {peer} {answer} in the same run, or call i{message.name}, and wait for it only in a "
        f"later run, in which {peer} {answer}s."
    )


def _first_between(wait: Pending, peers: Sequence[int]) -> Message | None:
    """Return the message that peers have to answer: the rank's own, or one ahead of it."""
    ahead = wait.ahead() if isinstance(wait, Message) else ()
    for operation in (*ahead, wait):
        if isinstance(operation, Message) and not {*peers}.isdisjoint(operation.waits_for()):
            return operation
    return None
