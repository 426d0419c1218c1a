"""Messages that nearly matched: sends and recvs that differ in tag, group or peer."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from distlab.sim.messages.message import Communicator, Message
from distlab.sim.messages.pending import ANY_SOURCE, Pending
from distlab.sim.postmortem.standstill import Standstill, named
from distlab.sim.reporting.report import place
from distlab.util.text import clauses, rank_names

Pair = tuple[Message, Message]  # a send and a recv


def near_pairs(unmatched: Iterable[Message], waiting: Iterable[Message]) -> Iterator[Pair]:
    """Yield unmatched pairs of a send and a recv that agree on the source or on the destination.

    Args:
        unmatched: Sends and recvs that were posted but have not matched.
        waiting: Messages that block ranks; every pair includes one of them.
    """
    by_rank, by_peer = defaultdict(list), defaultdict(list)
    for message in unmatched:
        by_rank[message.name, message.rank].append(message)
        by_peer[message.name, message.peer].append(message)
    for wait in waiting:
        name = "recv" if wait.name == "send" else "send"
        for other in (*by_rank[name, wait.peer], *by_peer[name, wait.rank]):
            yield (wait, other) if wait.name == "send" else (other, wait)


def between_the_same_ranks(pairs: Sequence[Pair]) -> str:
    """Explain why a send and a recv between the same ranks do not match; "" if there are none.

    For example: Rank 0 sends to rank 1 with tag 1, but rank 1 receives with tag 2.
    """
    for send, recv in pairs:
        if send.peer == recv.rank and recv.peer in (send.rank, ANY_SOURCE):
            return f"Rank {send.rank} sends to rank {recv.rank} {_difference(send, recv)}"
    return ""


def _difference(send: Message, recv: Message) -> str:
    but = f"but rank {recv.rank} receives"
    if send.group != recv.group:
        return (
            f"on the group of {rank_names(send.group)}, {but} on the group of "
            f"{rank_names(recv.group)}: give both the same group."
        )
    if send.tag != recv.tag and send.key == recv.key:
        return (
            f"with tag {send.tag}, {but} with tag {recv.tag}: give both the same tag, or, if both "
            "tags are used, use them in the same order on both ranks."
        )
    if _are_of_one_group(send.key, recv.key):
        there, here = ("in", "without one") if send.is_in_batch else ("without", "in one")
        return f"{there} a batch, {but} {here}: {_APART}"
    return f"on one group, {but} on another group of the same ranks: give both the same group."


_APART = (
    "on NCCL, a batch is on the group's communicator and a single message on one of the two ranks, "
    "so that they never meet. Call batch_isend_irecv on both ranks."
)


def _are_of_one_group(key: object, other: object) -> bool:
    """Return whether two communicators belong to one group."""
    if isinstance(key, Communicator) and isinstance(other, Communicator):
        return key.group == other.group
    return False


def doubtful(
    pairs: Iterable[Pair],
    still: Standstill,
    ranks: Collection[int],
    *,
    is_cycle: bool,
    trusts_peers: bool = True,
) -> list[Pair]:
    """Return the pairs in which a peer may be wrong.

    A peer is trusted if a message has already gone the same way, unless several threads of a rank
    wait for the same message. In a cycle, pairs with a rank outside the cycle are left
    out, because they are a consequence of it. No pairs are returned if a rank has other blocked
    threads, because one of those may be about to make the missing call.

    Args:
        ranks: Ranks whose waits are in the pairs.
        is_cycle: True if the ranks wait for each other.
        trusts_peers: False if messages that went the same way do not count.
    """
    first = (still.blocked[rank] for rank in ranks)
    repeated = set(_addresses(first)).intersection(_addresses(still.beside))
    if not repeated and not {wait.rank for wait in still.beside}.isdisjoint(ranks):
        return []
    return [
        pair
        for pair in pairs
        if not (is_cycle and any(message.rank not in ranks for message in pair))
        and not any(
            trusts_peers
            and still.blocked.get(message.rank) is message
            and message.rank in ranks
            and still.history.arrived.get(_ends(message))
            and _address(message) not in repeated
            for message in pair
        )
    ]


def _addresses(waits: Iterable[Pending]) -> Iterator[tuple[int, str, int]]:
    for wait in waits:
        if isinstance(wait, Message):
            yield _address(wait)


def _address(message: Message) -> tuple[int, str, int]:
    return message.rank, message.name, message.peer


def _ends(message: Message) -> tuple[int, int]:
    """Return the source and destination of a message."""
    ends = message.rank, message.peer
    return ends if message.name == "send" else ends[::-1]


def on_a_closed_connection(waiting: Iterable[Message]) -> str:
    """Return why the connection that a message needs is closed; "" if none is closed."""
    for wait in waiting:
        if wait.peer != ANY_SOURCE and (why := wait.mailbox.why_closed(wait)):
            return (
                f"The connection of {rank_names({wait.rank, wait.peer})} is closed, "
                f"because {why}. As on gloo, no message passes there any more: wait without a "
                "limit, or ask is_completed()."
            )
    return ""


def taken_by_another(waiting: Iterable[Message]) -> str:
    """Return a hint if a recv from any rank may have taken a later recv's message; else ""."""
    for wait in waiting:
        site = wait.mailbox.taken_at(wait) if wait.name == "recv" else None
        if site:
            return (
                f"Rank {wait.rank} has taken a message of rank {wait.peer} with the recv from any "
                f"rank at {place(site)}: was it meant for the recv from rank {wait.peer}?"
            )
    return ""


def with_another_rank(pairs: Sequence[Pair]) -> str:
    """Return a hint if a send and a recv may have been meant for each other; else "".

    For example: Rank 0 sends to rank 1, but rank 1 receives from rank 2: is one of the peers wrong?
    """
    for send, recv in pairs:
        if recv.peer != ANY_SOURCE and (send.peer == recv.rank) != (send.rank == recv.peer):
            ends = (
                f"rank {send.rank} sends to rank {send.peer}",
                f"rank {recv.rank} receives from rank {recv.peer}",
            )
            first, second = ends if send.peer == recv.rank else ends[::-1]
            return f"{first.capitalize()}, but {second}: is one of the peers wrong?"
    return ""


def counted_inside_the_group(pairs: Sequence[Pair]) -> str:
    """Return a hint if a peer seems to be a rank within the group, not in the world; else "".

    The hint begins: Rank 1 sends to rank 2, and rank 3 waits for rank 1 to send. Inside the group …
    """
    for send, recv in pairs:
        is_usual = len(send.group) == send.clock.num_ranks
        if not is_usual and send.group == recv.group and ANY_SOURCE not in (send.peer, recv.peer):
            if recv.peer == send.rank and _is_number_of(send.peer, recv):
                return (
                    f"Rank {send.rank} sends to rank {send.peer}, and rank {recv.rank} waits for "
                    f"rank {send.rank} to send. {_number(recv, send.peer, 'dst')}"
                )
            if send.peer == recv.rank and _is_number_of(recv.peer, send):
                return (
                    f"Rank {recv.rank} receives from rank {recv.peer}, and rank {send.rank} waits "
                    f"for rank {recv.rank} to receive. {_number(send, recv.peer, 'src')}"
                )
    return ""


def _is_number_of(number: int, message: Message) -> bool:
    """Return whether a message's own rank has this number in the group, but not in the world."""
    group = message.group
    return number != message.rank and number < len(group) and group[number] == message.rank


def _number(message: Message, number: int, end: str) -> str:
    return (
        f"Inside the group of {rank_names(message.group)}, rank {message.rank} is number {number}, "
        f"but {end}= counts all ranks: is group_{end}={number} meant?"
    )


# Messages that would match if NCCL did not run unbatched operations one at a time

MAX_APART = 2
_OF_PAIRS = (
    "on NCCL, operations of a pair that are not batched run one after the other. Give both to "
    "batch_isend_irecv."
)
_OF_STREAMS = (
    "on NCCL, what is on one communicator or one stream runs in the order of the calls. Give all "
    "messages that belong together to one batch_isend_irecv, and make the other calls in one order "
    "on all ranks."
)
_OF_BATCHES = (
    "on NCCL, the batches of a group run one after the other. Give all of these operations to one "
    "batch_isend_irecv."
)


def kept_apart(still: Standstill, ranks: Collection[int]) -> str:
    """Say which messages would match if they did not have to queue; "" if none would.

    The text begins: Rank 0's irecv from rank 1 waits behind its isend to rank 1: on NCCL, …

    Args:
        ranks: Ranks whose queued messages are checked.
    """
    queued = [message for message in still.queued if message.rank in ranks]
    apart = list(_kept_apart(queued, [*still.unmatched, *still.queued]))
    if not apart:
        return ""
    apart_words = [_clause(message, still.blocked) for message in apart[:MAX_APART]]
    words = clauses(apart_words) + (", and so on" if len(apart) > MAX_APART else "")
    return f"{words[0].upper()}{words[1:]}: {_rule(apart)}"


def _rule(apart: Sequence[Message]) -> str:
    if any(message.is_in_batch for message in apart):
        return _OF_BATCHES
    ahead = [message.ahead()[0] for message in apart]
    are_of_pairs = all(a.peer == message.peer for a, message in zip(ahead, apart, strict=True))
    return _OF_PAIRS if are_of_pairs else _OF_STREAMS


def _kept_apart(queued: Sequence[Message], posted: Sequence[Message]) -> Iterator[Message]:
    points = {_meeting_point(message, message.name) for message in posted}
    other_side = {"send": "recv", "recv": "send"}
    for message in queued:
        if _meeting_point(message, other_side[message.name]) in points:
            yield message


def _meeting_point(message: Message, name: str) -> tuple[object, ...]:
    """Return a key for matching a message; the key of its match differs only in ``name``.

    Where messages queue, as on NCCL, tags do not count.
    """
    return message.key, *_ends(message), name


def _clause(message: Message, blocked: Mapping[int, Pending]) -> str:
    """Return a clause such as ``rank 0's irecv from rank 1 waits behind its isend to rank 1``."""
    letter = "" if blocked.get(message.rank) is message else "i"
    ahead = named(message.ahead())
    return (
        f"rank {message.rank}'s {letter}{message.name} {message.toward()} waits behind its {ahead}"
    )
