"""What the tests of all-reduces share: sums, and that all ranks hold the same bits."""

from typing import Any

from distlab.grade import Grade, check
from judging.checks import of_members, short
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from judging.tensors import (
    FRACTIONS,
    KINDS,
    NO_KEYWORDS,
    Keywords,
    plain,
    reduce_all_kinds,
    reduce_fractions,
    tensors_of,
)


def check_sums_of_powers(by_rank: list[Any]) -> None:
    """Check what ``reduce_my_rank`` returned on each rank."""
    n = len(by_rank)
    total = float(2**n - 1)
    for rank, (least, greatest) in enumerate(by_rank):
        seen = f"{least}" if least == greatest else f"between {least} and {greatest}"
        check(
            least == greatest == total,
            f"rank {rank} of {n}: before the call, rank r holds 2^r, so the sum is {total}, but x "
            f"is {seen}. {_why_not_the_sum(by_rank, rank)}",
        )


def _why_not_the_sum(by_rank: list[Any], rank: int) -> str:
    """Say why a rank does not hold the sum of 2^0, 2^1, …"""
    value, greatest = by_rank[rank]
    if value != greatest:
        return "Is every part of x added once on its way, and sent to all ranks?"
    if value == 2.0**rank:
        return (
            "That is the value that x had before: does the sum come to this rank, and is it "
            "written into x itself? `x = x + …` makes a new tensor, `x += …` writes into the "
            "caller's."
        )
    if value.is_integer() and 0 < value < 2 ** len(by_rank):
        held = [r for r in range(len(by_rank)) if int(value) >> r & 1]
        return (
            f"That is the sum of the numbers of ranks {held}: is every rank's number added exactly "
            "once and passed on?"
        )
    return "Is every rank's number added once, and the sum sent to all ranks?"


def check_sums(by_rank: list[Any]) -> None:
    """Check what ``reduce_all_kinds`` returned on each rank."""
    parts = [tensors_of(rank) for rank in range(len(by_rank))]
    sums = plain([sum(tensors[1:], tensors[0]) for tensors in zip(*parts, strict=True)])
    for rank, tensors in enumerate(by_rank):
        for kind, wanted, got in zip(KINDS, sums, tensors, strict=True):
            check(
                got == wanted,
                f"rank {rank} of {len(by_rank)}, {kind[1]} of shape {kind[0]}: the sum should be "
                f"{short(wanted)}, but x is {short(got)}. Write the sum into x itself, and send x "
                "in its own dtype: a cast on the way loses digits.",
            )


def check_same_bits(grade: Grade, name: str, n: int, keywords: Keywords = NO_KEYWORDS) -> None:
    """Check that all ranks hold the same bits after an all-reduce of fractions."""
    num_elements = grade.random.randrange(500, 1000)
    by_rank = grade.run(reduce_fractions, n, name, num_elements, keywords).results
    for rank, sums in enumerate(by_rank):
        for dtype, got, first in zip(FRACTIONS, sums, by_rank[0], strict=True):
            where = f"rank {rank} of {n}, {dtype}"
            check(
                len(got) == num_elements,
                f"{where}: x had {num_elements} elements before the call, and has {len(got)} after "
                "it.",
            )
            differ = sum(a != b for a, b in zip(first, got, strict=True))
            check(
                not differ,
                f"{where}: x differs from rank 0's x in {differ} of {len(got)} elements, perhaps "
                "only in the last bits. Ranks that add in different orders round differently, and "
                "their models drift apart.",
            )


def check_inside_a_group(grade: Grade, name: str) -> None:
    """Check the sums of an all-reduce in a group whose ranks have other numbers in the world."""
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, reduce_all_kinds, name), if_stuck=STUCK_IN_GROUP
    )
    check_sums(of_members(run))
