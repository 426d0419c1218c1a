"""Checks that all judges share; their errors name the rank whose result is wrong."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from math import inf
from random import Random
from sys import float_info
from typing import Any, Literal

from distlab.grade import Run, check, check_cost
from distlab.sim import Cluster, Faults, Options
from distlab.util.text import counted, joined
from judging.groups import MEMBERS

Text = Literal["same", "alike", "any"]  # how closely the ranks' error texts must agree

LATENCY_S, BYTE_S = 7e-6, 1 / 13e9
UNIFORM = Cluster(1, 16, latency_s=LATENCY_S, nvlink_bytes_per_s=1 / BYTE_S)  # all links are equal
AS_NCCL = Options(p2p_order="pair")  # messages within a pair of ranks wait for each other
ON_CPU = Options(has_devices=False)  # tensors are on the CPU, also with --semantics nccl
MEASURED = Options(has_devices=True)  # counts each rank's memory; computation takes no time


def uneven(random: Random, num_ranks: int, options: Options | None = None) -> Options:
    """Return options with a random delay on each link, drawn separately for each direction.

    A message may then arrive long before the sender's buffer is free, which exposes ranks that
    write into the buffer too early.
    """
    pairs = permutations(range(num_ranks), 2)
    delays_s = {pair: random.choice((0.0, 1e-3, 5e-3)) for pair in pairs}
    return replace(options or Options(), faults=Faults(delays_s=delays_s))


def rounds_of(run: Run, num_bytes: int) -> float:
    """Return how many messages of ``num_bytes``, one after the other, take as long as the run."""
    return round(run.seconds / (LATENCY_S + num_bytes * BYTE_S), 2)


def distance(a: Any, b: Any) -> float:
    """Return the greatest difference between corresponding numbers; inf if the shapes differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return (
            distance([a[key] for key in a], [b[key] for key in a]) if a.keys() == b.keys() else inf
        )
    if isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str):
        return max(map(distance, a, b), default=0.0) if len(a) == len(b) else inf
    if a == b:  # also covers equal infinities
        return 0.0
    are_numbers = all(isinstance(x, int | float) and abs(x) <= float_info.max for x in (a, b))
    return abs(a - b) if are_numbers and float in (type(a), type(b)) else inf


def is_close(a: Any, b: Any, tolerance: float = 1e-9) -> bool:
    """Return whether two values are equal, with numbers equal up to rounding."""
    return distance(a, b) <= tolerance


def exceeds(found: Any, right: Any) -> bool:
    """Return whether costs are higher than they should be: more of them, or larger numbers."""
    got, wanted = [*_numbers_in(found)], [*_numbers_in(right)]
    if len(got) == len(wanted) and got:
        return sum(got) > sum(wanted) or max(got) > max(wanted)
    return len(got) > len(wanted) or sum(got) > sum(wanted)


def _numbers_in(value: Any) -> Iterator[float]:
    """Yield the numbers in nested collections; truth values and texts are left out."""
    if isinstance(value, Mapping):
        value = [*value.items()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers_in(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def same_loss(a: Any, b: Any) -> bool:
    """Return whether losses or accuracies are equal up to float32 rounding."""
    return is_close(a, b, 1e-6)


def check_refused(
    by_rank: Sequence[Mapping[str, str]], what: str, *names: str, text: Text = "any"
) -> None:
    """Check that every rank has raised a ValueError whose text contains ``names``.

    Args:
        by_rank: Result of ``calls.refusal_of`` on each rank.
        what: The call that must be refused, as the subject of a sentence.
        names: Words that the text must contain, because the contract promises them.
        text: How closely the texts must agree: "same" on all ranks, so that no rank names itself;
            "alike", which is the same except where a rank names itself; or "any" text at all.
    """
    texts = [refusal["text"] for refusal in by_rank]
    if text == "alike" and len({*map(_without_rank, texts, range(len(texts)))}) == 1:
        text = "any"
    for rank, refusal in enumerate(by_rank):
        is_alone = len(by_rank) == 1
        error = "a ValueError" if is_alone else "a ValueError on every rank"
        here = ";" if is_alone else f"; on rank {rank} of {len(by_rank)}"
        wanted = f"{what} should be {error}"
        check(refusal["type"], f"{wanted}{here} there was none.")
        got = f"{refusal['type']}: {short(refusal['text'])}"
        check(refusal["type"] == "ValueError", f"{wanted}{here} it is {got}.")
        check(
            text == "any" or texts[rank] == texts[0],
            f"{wanted}{here} it says {short_beside(texts[rank], texts[0])}, but on rank 0 "
            f"{short_beside(texts[0], texts[rank])}. Decide by what all ranks know, and word it by "
            "that alone, so that all raise the same error.",
        )
        missing = [name for name in names if name not in refusal["text"]]
        check(not missing, f"{wanted}{here} it should name {joined(names)}, and is {got}.")


def _without_rank(text: str, rank: int) -> str:
    """Return an error's text without the number of the rank that raised it."""
    return re.sub(rf"\brank\W{{0,2}}{rank}\b", "rank", text, flags=re.IGNORECASE)


def check_silent(run: Run, what: str) -> None:
    """Check that no message was sent and no collective was called in a run."""
    check_cost(
        not any(run.messages) and not any(run.collectives),
        f"{what} needs no communication: every rank can compute it alone. Messages sent per rank: "
        f"{run.messages}; collective calls per rank: {run.collectives}.",
    )


def check_peak(run: Run, most_bytes: Sequence[float], what: str) -> None:
    """Check that no rank of a ``MEASURED`` run has ever held more memory than it may.

    Args:
        run: Run with ``options=MEASURED``.
        most_bytes: Largest number of bytes by rank, inputs included.
        what: End of the error text: the memory a rank needs, and the likely cause of using more.
    """
    for rank, (peak, most) in enumerate(zip(run.peak_bytes, most_bytes, strict=True)):
        check_cost(
            peak <= most,
            f"rank {rank} of {len(most_bytes)} held {peak:,} bytes at once, {peak / most:.1f} "
            f"times the {most:,.0f} that it needs. {what}",
        )


def of_members(run: Run) -> list[Any]:
    """Return the results of the group's members, from a run of ``inside_group``."""
    return [run.results[member] for member in MEMBERS]


def short(value: Any) -> str:
    """Return a value's repr, cut to one line."""
    text = repr(value)
    return text if len(text) <= 70 else f"{text[:68]} …"


def short_beside(value: Any, other: Any) -> str:
    """Return a value's repr on one line, with enough digits to tell it from ``other``'s."""
    # Equal values, which are the usual case, need no comparison of their digits.
    for num_digits in (6, 9, 12) if value != other else ():
        text = short(_rounded(value, num_digits))
        if text != short(_rounded(other, num_digits)):
            return text
    return short(value)


def _rounded(value: Any, num_digits: int) -> Any:
    """Round the fractions in nested lists to ``num_digits`` significant digits."""
    if isinstance(value, list):
        return [_rounded(item, num_digits) for item in value]
    is_fraction = isinstance(value, float) and not value.is_integer()
    return float(f"{value:.{num_digits}g}") if is_fraction else value


Edge = tuple[int, int]  # sender and receiver


def edges_of(run: Run) -> list[Edge]:
    """Return the sender and receiver of every message, sorted."""
    trace = run.trace
    return sorted((send.rank, recv.rank) for send, recv in trace.pairs()) if trace else []


def sizes_of(run: Run) -> Counter[int]:
    """Count the messages by their number of bytes."""
    trace = run.trace
    return Counter(send.num_bytes for send, _ in trace.pairs()) if trace else Counter()


def check_no_collective(run: Run, what: str) -> None:
    """Check that a function uses only point-to-point messages; ``what`` begins the error text."""
    check(
        not any(run.collectives),
        f"{what}; yours calls a built-in collective, or a barrier. Collective calls per rank: "
        f"{run.collectives}.",
    )


def check_collectives(run: Run, expected: Sequence[int], what: str) -> None:
    """Check how many collectives each rank calls, and that no rank sends a message.

    More calls, or messages besides them, cost too much; fewer calls are wrong.

    Args:
        run: Run of the simulated world.
        expected: Number of calls by rank.
        what: Purpose of the calls, which begins the error text.
    """
    sends = sum(event.kind == "send" for event in run.trace.events) if run.trace else 0
    has_fewer = any(got < few for got, few in zip(run.collectives, expected, strict=True))
    judge = check if has_fewer else check_cost
    judge(
        run.collectives == [*expected] and not sends,
        f"{what}: by rank, there should be {[*expected]} collective calls and no other message; "
        f"there are {run.collectives}, and {counted(sends, 'message')}.",
    )


def check_waited(run: Run) -> None:
    """Check that every send and receive of the simulated world was waited for."""
    left = run.trace.unwaited if run.trace else []
    check(
        not left,
        "all sends and receives should be complete on return, so that the caller may overwrite the "
        "tensors that were sent. Nobody has waited for: "
        f"{'; '.join(' '.join(row.split()) for row in left[:2])}",
    )


def check_sizes(run: Run, expected: Mapping[int, int]) -> None:
    """Check the number of messages of each size; empty tensors need not be sent."""
    sizes = sizes_of(run)
    judge = check_cost if exceeds([*sizes.elements()], [*Counter(expected).elements()]) else check
    for num_bytes in sorted({*expected, *sizes}):
        wanted, got = expected.get(num_bytes, 0), sizes[num_bytes]
        judge(
            got == wanted or (num_bytes == 0 and got < wanted),
            f"there should be {counted(wanted, 'message')} of {num_bytes:,} bytes, not {got}. Of "
            f"all sizes, there should be {short(dict(sorted(expected.items())))} (bytes: "
            f"messages), and there are {short(dict(sorted(sizes.items())))}. Send the tensor as it "
            "is, in one message and in its own dtype, whatever its shape and size.",
        )


def rounds_of_tree(edges: Sequence[Edge], root: int) -> int:
    """Return the fewest rounds for a tree's messages, if a rank sends one message per round."""
    below = (rounds_of_tree(edges, dst) for src, dst in edges if src == root)
    return max((1 + i + rounds for i, rounds in enumerate(sorted(below, reverse=True))), default=0)


def edges_with(run: Run, num_bytes: int) -> dict[Edge, int]:
    """Count the messages of ``num_bytes`` by sender and receiver."""
    pairs = run.trace.pairs() if run.trace else []
    return Counter((send.rank, recv.rank) for send, recv in pairs if send.num_bytes == num_bytes)
