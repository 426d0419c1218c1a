"""Messages that would match if NCCL did not run unbatched operations one after the other."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from distlab.sim.messages.message import Message
from distlab.sim.messages.pending import Pending
from distlab.util.text import clauses

MAX_CLAUSES = 2
_OF_PAIRS = (
    "on NCCL, operations of a pair that are not batched run one after the other. Give both to "
    "batch_isend_irecv."
)
_OF_BATCHES = (
    "on NCCL, the batches of a group run one after the other. Give all of these operations to one "
    "batch_isend_irecv."
)


def named(ahead: Sequence[Message]) -> str:
    """Write ``isend to rank 1``, or ``batch with the isend to rank 1``."""
    first = ahead[0]
    name = f"i{first.name} {first.toward()}"
    is_batch = first.turn is not None and first.turn.is_batch
    return f"batch with the {name}" if is_batch else name


def kept_apart(
    queued: Sequence[Message],
    unmatched: Sequence[Message],
    blocked: Mapping[int, Pending],
    ranks: Collection[int],
) -> str:
    """Say which messages would have matched if one had not waited for its turn; "" if none.

    Rank 0's irecv from rank 1 waits behind its isend to rank 1: on NCCL …

    Args:
        queued: messages that have not started.
        unmatched: messages that have started but have no match.
        blocked: by rank, the operation in which it waits.
        ranks: those whose messages count.
    """
    apart = list(_kept_apart([m for m in queued if m.rank in ranks], [*unmatched, *queued]))
    if not apart:
        return ""
    apart_words = [_clause(message, blocked) for message in apart[:MAX_CLAUSES]]
    is_of_batches = any(m.turn is not None and m.turn.is_batch for m in apart)
    words = clauses(apart_words) + (", and so on" if len(apart) > MAX_CLAUSES else "")
    return f"{words[0].upper()}{words[1:]}: {_OF_BATCHES if is_of_batches else _OF_PAIRS}"


def _kept_apart(queued: Sequence[Message], others: Sequence[Message]) -> Iterator[Message]:
    there = {_address(message, message.name) for message in others}
    other_side = {"send": "recv", "recv": "send"}
    for message in queued:
        if _address(message, other_side[message.name]) in there:
            yield message


def _address(message: Message, name: str) -> tuple[object, ...]:
    """Return the address of a message; its match has the same one with the other name."""
    is_send = message.name == "send"
    ends = (message.rank, message.peer) if is_send else (message.peer, message.rank)
    return message.key, *ends, message.tag, name


def _clause(message: Message, blocked: Mapping[int, Pending]) -> str:
    """Write ``rank 0's irecv from rank 1 waits behind its isend to rank 1``."""
    letter = "" if blocked.get(message.rank) is message else "i"
    ahead = named(message.ahead())
    return (
        f"rank {message.rank}'s {letter}{message.name} {message.toward()} waits behind its {ahead}"
    )
