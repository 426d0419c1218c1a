"""Messages that nearly met: a send and a recv with another tag, group or peer."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from distlab.sim.mailbox import ANY_SOURCE, Message
from distlab.sim.report import rank_names

Pair = tuple[Message, Message]  # a send and a recv


def near_pairs(unmatched: Iterable[Message], waiting: Iterable[Message]) -> Iterator[Pair]:
    """Find sends and recvs that have not met, although a rank occurs in both.

    Args:
        unmatched: all sends and recvs that were posted and have not met.
        waiting: those that ranks wait in; each pair has one of them.
    """
    by_rank, by_peer = defaultdict(list), defaultdict(list)
    for message in unmatched:
        by_rank[message.name, message.rank].append(message)
        by_peer[message.name, message.peer].append(message)
    for mine in waiting:
        name = "recv" if mine.name == "send" else "send"
        for other in (*by_rank[name, mine.peer], *by_peer[name, mine.rank]):
            yield (mine, other) if mine.name == "send" else (other, mine)


def between_the_same_ranks(pairs: Sequence[Pair]) -> str:
    """Say what keeps a send from the recv that its receiver has posted for it; "" if there is none.

    Rank 0 sends to rank 1 with tag 1, but rank 1 receives with tag 2.
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
    if send.tag != recv.tag:
        return f"with tag {send.tag}, {but} with tag {recv.tag}: give both the same tag."
    return f"on one group, {but} on another one of the same ranks: give both the same group."


def with_another_rank(pairs: Sequence[Pair]) -> str:
    """Ask whether a send and a recv were meant for each other; "" if there are none.

    Rank 0 sends to rank 1, but rank 1 receives from rank 2: is one of the peers wrong?
    """
    for send, recv in pairs:
        if recv.peer != ANY_SOURCE and (send.peer == recv.rank) != (send.rank == recv.peer):
            ends = (
                f"rank {send.rank} sends to rank {send.peer}",
                f"rank {recv.rank} receives from rank {recv.peer}",
            )
            one, other = ends if send.peer == recv.rank else ends[::-1]
            return f"{one.capitalize()}, but {other}: is one of the peers wrong?"
    return ""
