"""Say why nobody can go on: who waits for whom, the cycle in words, and what kind it is."""

from collections.abc import Mapping, Sequence

from distlab.sim.errors import BlockedCall, Deadlock
from distlab.sim.mailbox import Message
from distlab.sim.pending import Pending

SHOWN = 12  # ranks listed one by one; beyond that, a count


def explain(blocked: Mapping[int, Pending], ended: Sequence[int]) -> Deadlock:
    """Make the error for a world in which no rank can go on.

        deadlock: rank 0 waits for rank 1, rank 1 waits for rank 0
          rank 0  recv from rank 1, (4,) float32    ring.py:41 in exchange
          rank 1  recv from rank 0, (4,) float32    ring.py:41 in exchange

    Args:
        blocked: by rank, the operation that blocks it.
        ended: ranks whose function has returned.
    """
    waits_for = {rank: list(pending.waits_for()) for rank, pending in blocked.items()}
    gone = sorted({peer for peers in waits_for.values() for peer in peers} & set(ended))
    cycle = find_cycle(waits_for)
    if gone:
        kind, ranks, headline = _ended(waits_for, gone)
    elif _is_missing_rank(blocked, cycle):
        kind, ranks, headline = _missing(blocked, waits_for)
    elif cycle:
        kind, ranks = "cycle", cycle
        pairs = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        headline = ", ".join(f"rank {rank} waits for rank {peer}" for rank, peer in pairs)
    else:
        kind, ranks, headline = "cycle", sorted(blocked), "no rank can go on"
    calls = [_call(rank, blocked[rank], waits_for[rank]) for rank in sorted(blocked)]
    message = "\n".join([f"deadlock: {headline}", *_table(calls), *_advice(kind, calls)])
    return Deadlock(message, ranks, kind, calls)


def find_cycle(waits_for: Mapping[int, Sequence[int]]) -> list[int]:
    """Find ranks of which each waits for the next and the last for the first; [] if none do."""
    for start in sorted(waits_for):
        path: list[int] = []
        rank = start
        while rank in waits_for and rank not in path:
            path.append(rank)
            rank = min((p for p in waits_for[rank] if p in waits_for), default=-1)
        if rank in path:
            return path[path.index(rank) :]
    return []


def _ended(waits_for: Mapping[int, Sequence[int]], gone: list[int]) -> tuple[str, list[int], str]:
    victims = sorted(rank for rank, peers in waits_for.items() if set(peers) & set(gone))
    return (
        "peer ended",
        gone,
        f"{_ranks(victims)} {_verb(victims, 'wait')} for {_ranks(gone)}, "
        f"whose function has already returned",
    )


def _is_missing_rank(blocked: Mapping[int, Pending], cycle: list[int]) -> bool:
    """Whether a collective is short of ranks that are busy with something else."""
    return any(not isinstance(pending, Message) for pending in blocked.values())


def _missing(
    blocked: Mapping[int, Pending], waits_for: Mapping[int, Sequence[int]]
) -> tuple[str, list[int], str]:
    collective = min(
        (rank for rank, pending in blocked.items() if not isinstance(pending, Message)),
        key=lambda rank: (len(waits_for[rank]), rank),
    )
    absent = sorted(waits_for[collective])
    there = sorted(set(blocked[collective].group) - set(absent))
    return (
        "missing rank",
        absent,
        f"{_ranks(there)} {_verb(there, 'wait')} in {blocked[collective].name}, "
        f"{_ranks(absent)} {_verb(absent, 'wait')} elsewhere",
    )


def _call(rank: int, pending: Pending, waits_for: Sequence[int]) -> BlockedCall:
    return BlockedCall(rank, pending.name, tuple(waits_for), pending.where(), pending.text())


def _table(calls: Sequence[BlockedCall]) -> list[str]:
    width = max(len(call.text) for call in calls)
    lines = [f"  rank {c.rank:<3} {c.text:<{width}}  {c.where}" for c in calls[:SHOWN]]
    if len(calls) > SHOWN:
        lines.append(f"  … and {len(calls) - SHOWN} more")
    return lines


def _advice(kind: str, calls: Sequence[BlockedCall]) -> list[str]:
    if kind == "cycle" and all(call.operation == "send" for call in calls):
        return [
            "All of them send first, and a send is done only when it is received: let one side "
            "receive first, or post with isend and irecv and wait afterwards."
        ]
    if kind == "missing rank":
        return ["Every rank of a group must make the same collective calls in the same order."]
    if kind == "peer ended":
        return ["Does that rank leave a loop one round early, or skip a call?"]
    return []


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN])) + (" …" if len(ranks) > SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _verb(ranks: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb
