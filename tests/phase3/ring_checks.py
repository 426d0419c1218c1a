"""What the judges of tasks 3.1 to 3.4 share: who sends what to whom round a ring, and the sums."""

from collections.abc import Sequence
from typing import Any

from distlab.grade import Run, check
from distlab.sim import Options
from distlab.util.text import counted
from judging.checks import edges_of, rounds_of, short_beside
from judging.groups import MEMBERS, OUTER_WORLD_SIZE
from judging.tensors import FRACTIONS, numbers_of
from phase3 import ring as b

BEFORE = "before the call, rank r holds 2^r, times 1 to 7 by place. Divided by these,"
ITEM_BYTES = 4  # of a float32, which the costs are counted with
SLACK_BYTES = 256  # for a few numbers
OF_MESSAGES = "a ring should be made of messages between neighbours (exchange, isend, irecv)"
IN_GROUP = f"inside the group {list(MEMBERS)} of {OUTER_WORLD_SIZE} ranks, "
STUCK = (
    "In each step, every rank should start its send and its receive together, as exchange does: "
    "where all ranks wait for their sends first, nobody receives."
)
AS_NCCL = Options(p2p_order="pair")
NOT_IN_A_BATCH = (
    "On NCCL, messages between the same two ranks wait for each other, unless they start in one "
    "batch_isend_irecv, as in exchange (given): isend beside irecv is no batch. Of 2 ranks, each "
    "is the right and the left neighbour of the other."
)


def chunk_bytes(num_elements: int, n: int) -> list[int]:
    """The bytes of each chunk: the first ones are one element longer."""
    share, longer = divmod(num_elements, n)
    return [ITEM_BYTES * (share + (rank < longer)) for rank in range(n)]


def sent_by(run: Run, rank: int) -> list[int]:
    """The bytes of what a rank sends, message by message, but for empty ones; ordered."""
    pairs = run.trace.pairs() if run.trace else []
    return sorted(send.num_bytes for send, _ in pairs if send.rank == rank and send.num_bytes)


def check_neighbours(run: Run) -> None:
    """Check that every rank sends to the next one alone."""
    n, edges = len(run.results), edges_of(run)
    is_left = n > 2 and all(dst == (src - 1) % n for src, dst in edges)
    cause = " These are left neighbours: your chunks travel the other way." if is_left else ""
    for rank in range(n):
        right = (rank + 1) % n
        found = sorted({dst for src, dst in edges if src == rank})
        check(
            set(found) <= {right},
            f"rank {rank} of {n} sends to ranks {found}; round the ring, every rank should send to "
            f"its right neighbour alone, here rank {right}.{cause}",
        )


def check_sent(run: Run, rank: int, num_elements: int, missing: int, which: str) -> None:
    """Check that a rank has sent every chunk but one, once, in any order.

    Args:
        run: of the simulated world.
        rank: that is checked.
        num_elements: of the whole tensor.
        missing: the chunk that it need not send.
        which: says in words what it should send.
    """
    chunks, found = chunk_bytes(num_elements, len(run.results)), sent_by(run, rank)
    wanted = [size for chunk, size in enumerate(chunks) if chunk != missing]
    check(
        found == sorted(wanted) and run.messages[rank] <= len(wanted),
        f"rank {rank} of {len(run.results)} should send {which}: {_text_of(wanted)}. It sends "
        f"{_text_of(found, run.messages[rank])}. {_why_not_sent(found, len(wanted), chunks)}",
    )


def _text_of(sizes: Sequence[int], count: int | None = None) -> str:
    count = len(sizes) if count is None else count
    longest = f", at most {max(sizes):,} in a message" if sizes else ""
    return f"{counted(count, 'message')}, {sum(sizes):,} bytes in all{longest}"


def _why_not_sent(found: Sequence[int], num_messages: int, chunks: Sequence[int]) -> str:
    longest = max(found, default=0)
    if longest == sum(chunks):
        return "A message holds the whole tensor: send one chunk in each step."
    if longest > max(chunks):
        return (
            "A message is longer than the longest chunk: are the chunks those of tensor_split, and "
            "do they travel in the dtype of x?"
        )
    if len(found) == num_messages:
        return (
            "Does each chunk travel as tensor_split cuts it, not padded, and is it the right one "
            "that this rank never sends?"
        )
    return "One chunk leaves in each step, as it is: not in parts, and none twice."


def check_all_reduce_sent(run: Run, num_elements: int) -> None:
    """Check that every rank sends 2(N-1) messages of a chunk, whichever chunks these are."""
    n = len(run.results)
    chunks, num_messages = chunk_bytes(num_elements, n), 2 * (n - 1)
    for rank in range(n):
        found = sent_by(run, rank)
        check(
            run.messages[rank] == num_messages and {*found} <= {*chunks},
            f"rank {rank} of {n} should send {counted(num_messages, 'message')}, each of a chunk, "
            f"{min(chunks):,} or {max(chunks):,} bytes; it sends "
            f"{_text_of(found, run.messages[rank])}. "
            f"{_why_not_sent(found, num_messages, chunks)}",
        )


def check_bytes_of_all_reduce(run: Run, num_elements: int) -> None:
    """Check that every rank sends all chunks but one, twice."""
    n, whole = len(run.results), ITEM_BYTES * num_elements
    chunks = chunk_bytes(num_elements, n)
    least, most = 2 * (whole - max(chunks)), 2 * (whole - min(chunks))
    for rank, sent in enumerate(run.bytes_sent):
        wanted = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        check(
            least <= sent <= most,
            f"rank {rank} of {n} should send {wanted} bytes, 2(N-1)/N of the {whole:,} of x; it "
            f"sends {sent:,.0f}. Every rank sends all chunks but one until the sums are whole, and "
            "all but one again.",
        )


def check_rounds(run: Run, num_elements: int, num_steps: int) -> None:
    """Check that all ranks send at the same time, in each of the steps."""
    n = len(run.results)
    taken = rounds_of(run, max(chunk_bytes(num_elements, n)))
    check(
        taken <= num_steps + 0.01,
        f"on {counted(n, 'rank')}, it should take as long as {counted(num_steps, 'message')} of a "
        f"chunk, one after the other; yours takes as long as {taken:g}. Start the send and the "
        "receive of a step together (exchange): a rank that waits until its own chunk has been "
        "received, and only then receives, holds up its left neighbour.",
    )


def check_sums_of_powers(run: Run) -> None:
    """Check what x holds, where rank r brought 2^r, and say whose numbers are missing."""
    n = len(run.results)
    total = float(2**n - 1)
    for rank, (least, greatest) in enumerate(run.results):
        seen = f"{least:g}" if least == greatest else f"between {least:g} and {greatest:g}"
        check(
            least == greatest == total,
            f"rank {rank} of {n}: {BEFORE} the sum is {total:g}, but x is {seen}. "
            f"{why_not_the_sum((least, greatest), rank, n)}",
        )


def why_not_the_sum(found: Sequence[float], rank: int, n: int) -> str:
    """Say why there is another number than the sum of 2^0, 2^1, …"""
    least, greatest = found
    if least != greatest:
        return (
            "A part of it is something else: are the chunks those of tensor_split, which one does "
            "each rank finish, and is every part added before it is sent on, or overwritten by "
            "what arrives next?"
        )
    if least == 2.0**rank:
        return (
            "That is what this rank brought: nothing has been added, or not to this chunk of x. "
            "`x = x + …` makes a new tensor, `x += …` writes into the caller's."
        )
    if least.is_integer() and 0 < least < 2**n:
        held = [r for r in range(n) if int(least) >> r & 1]
        return (
            f"That is the sum of what ranks {held} brought: does every chunk pass all ranks, and "
            "is it added on each?"
        )
    if least == (2**n - 1) / n:
        return "That is the mean: return the sum."
    return "Is what every rank brought added exactly once?"


def check_sums(by_rank: Sequence[Any], where: str = "", cause: str = "") -> None:
    """Check what x holds on each rank that took part, for every shape and dtype."""
    n = len(by_rank)
    for place, wanted in enumerate(sums_of(n)):
        for rank, tensors in enumerate(by_rank):
            got = tensors[place]
            check(
                got == numbers_of(wanted),
                f"{where}rank {rank} of {n}, {kind_text(place)}: the sum should be "
                f"{short_beside(numbers_of(wanted), got)}, but x is "
                f"{short_beside(got, numbers_of(wanted))}. "
                f"{_why_not_sums(place, got, rank, cause)}",
            )


def _why_not_sums(place: int, got: Any, rank: int, cause: str) -> str:
    if got == numbers_of(b.tensors_of(rank)[place]):
        return "That is what this rank brought: write the sum into x itself."
    return (
        f"{cause}Are the chunks views of x, which may have several dimensions and fewer elements "
        "than there are ranks? Add and send in the dtype of x: a cast loses digits."
    )


def sums_of(n: int) -> list[Any]:
    """The sum of what n ranks bring, tensor by tensor."""
    parts = [b.tensors_of(rank) for rank in range(n)]
    return [sum(tensors[1:], tensors[0]) for tensors in zip(*parts, strict=True)]


def kind_text(place: int) -> str:
    shape, dtype = b.KINDS[place]
    return f"{dtype} of shape {shape}"


def check_same_bits(run: Run) -> None:
    """Check that all ranks hold what rank 0 holds."""
    by_rank = run.results
    for rank, sums in enumerate(by_rank):
        for dtype, got, first in zip(FRACTIONS, sums, by_rank[0], strict=True):
            differ = [pair for pair in zip(first, got, strict=True) if pair[0] != pair[1]]
            there, here = differ[0] if differ else (0.0, 0.0)
            check(
                not differ,
                f"rank {rank} of {len(by_rank)}, {dtype}: x differs from rank 0's x in "
                f"{len(differ)} of {len(got)} elements, perhaps only in the last bits: {there} on "
                f"rank 0 is {here} here. Ranks that add in different orders round differently: let "
                "one rank finish a sum, and send it to the others.",
            )
