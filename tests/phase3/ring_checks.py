"""What the judges of tasks 3.1 to 3.4 share: who sends what to whom round a ring."""

from collections import Counter
from collections.abc import Sequence

from distlab.grade import Run, check
from distlab.util.text import counted
from judging.checks import edges_of
from judging.collective import Call
from judging.tensors import chunk_lengths

OF_MESSAGES = "a ring should be made of messages between neighbours (exchange, isend, irecv)"
STUCK = (
    "In each step, every rank should start its send and its receive together, as exchange does: "
    "where all ranks first wait for their sends, or all for what they receive, none gets on."
)
NOT_IN_A_BATCH = (
    "On NCCL, messages between the same two ranks wait for each other, unless they start in one "
    "batch_isend_irecv, as in exchange (given): isend beside irecv is no batch. Of 2 ranks, each "
    "is the right and the left neighbour of the other."
)
TOGETHER = (
    "Start the send and the receive of a step together (exchange): a rank that waits until its own "
    "chunk has been received, and only then receives, holds up its left neighbour."
)
CHUNKS_ARE_VIEWS = (
    "Are the chunks views of x, as x.view(-1).tensor_split cuts them, of which some are empty if "
    "there are fewer elements than ranks? Is every part added before it is sent on, or overwritten "
    "by what arrives next? Add and send in the dtype of x: a cast loses digits."
)


def messages_around(num_elements: int, n: int, times: int = 1) -> Counter[int]:
    """Return the lengths of all messages where every chunk goes round the ring so many times."""
    lengths: Counter[int] = Counter()
    for length in chunk_lengths(num_elements, n):
        lengths[length] += times * (n - 1)
    return lengths


def check_neighbours(run: Run) -> None:
    """Check that every rank sends to the next one alone."""
    n, edges = len(run.results), edges_of(run)
    is_left = n > 2 and all(dst == (src - 1) % n for src, dst in edges)
    cause = " These are left neighbours: your chunks travel the other way." if is_left else ""
    for rank in range(n):
        right = (rank + 1) % n
        to = sorted({dst for src, dst in edges if src == rank})
        check(
            set(to) <= {right},
            f"rank {rank} of {n} sends to ranks {to}; round the ring, every rank should send to "
            f"its right neighbour alone, here rank {right}.{cause}",
        )


def chunk_bytes(call: Call) -> list[int]:
    """Return the bytes of each chunk."""
    return [
        length * call.kind.item_bytes for length in chunk_lengths(call.kind.num_elements, call.n)
    ]


def sent_by(run: Run, rank: int) -> list[int]:
    """Return the bytes of each message that a rank sends, but for empty ones; ordered."""
    pairs = run.trace.pairs() if run.trace else []
    return sorted(send.num_bytes for send, _ in pairs if send.rank == rank and send.num_bytes)


def check_sent(call: Call, rank: int, wanted: Sequence[int], which: str) -> None:
    """Check that a rank sends chunks of the wanted bytes, in any order.

    Args:
        call: of the collective, as it ran.
        rank: sender.
        wanted: bytes of each message; an empty one need not be sent.
        which: name of what it should send.
    """
    sent, most = sent_by(call.run, rank), len(wanted)
    check(
        sent == sorted(size for size in wanted if size) and call.run.messages[rank] <= most,
        f"rank {rank} of {call.n} should send {which}: {text_of(wanted)}. It sends "
        f"{text_of(sent, call.run.messages[rank])}. "
        f"{why_not_sent(sent, most, chunk_bytes(call))}",
    )


def text_of(sizes: Sequence[int], count: int | None = None) -> str:
    """Say how many messages there are, by default as many as sizes, and how long."""
    count = len(sizes) if count is None else count
    longest = f", at most {max(sizes):,} in a message" if sizes else ""
    return f"{counted(count, 'message')}, {sum(sizes):,} bytes in all{longest}"


def why_not_sent(sent: Sequence[int], num_messages: int, chunks: Sequence[int]) -> str:
    """Say the likely cause where a rank sends other bytes than it should."""
    longest = max(sent, default=0)
    if {*sent} == {max(chunks)} and min(chunks) < max(chunks):
        return (
            "All messages are as long as the longest chunk: this is padding. Send every chunk as "
            "long as tensor_split cuts it."
        )
    if longest == sum(chunks):
        return "A message holds the whole tensor: send one chunk in each step."
    if longest > max(chunks):
        return (
            "A message is longer than the longest chunk: are the chunks those of tensor_split, and "
            "do they travel in the dtype of x?"
        )
    if len(sent) == num_messages:
        return (
            "Does each chunk travel as tensor_split cuts it, and is it the right one that this "
            "rank never sends?"
        )
    return "One chunk leaves in each step, as it is: not in parts, and none twice."


def check_bytes_of_all_reduce(call: Call) -> None:
    """Check that every rank sends all chunks but one, twice."""
    chunks, whole = chunk_bytes(call), call.kind.num_bytes
    least, most = 2 * (whole - max(chunks)), 2 * (whole - min(chunks))
    for rank, sent in enumerate(call.run.bytes_sent):
        wanted = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        check(
            least <= sent <= most,
            f"rank {rank} of {call.n} should send {wanted} bytes, 2(N-1)/N of the {whole:,} of x; "
            f"it sends {sent:,.0f}. Every rank sends all chunks but one until the sums are whole, "
            "and all but one again.",
        )
