"""What the tests of compressors share: sent and mean belong together, on all ranks alike."""

from collections.abc import Callable, Sequence
from math import inf, isnan
from typing import Any

from distlab.grade import Grade, Run, check
from distlab.sim import Options
from judging.checks import distance, is_close, of_members, short, short_beside, uneven
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase4 import reduced as b
from phase4.reduced import Case, How

RING = Options(algorithm="ring")  # of all-reduces and all-gathers
LITTLE_BYTES = 16  # to each other rank, for what is small: lengths, scales
EPSILON = {"float32": 1e-6, "float64": 1e-6, "bfloat16": 1e-2}
STUCK = (
    "All ranks call the same collectives in the same order, with tensors of the same length: agree "
    "on the length first where it depends on a rank's own values, also where it is 0."
)
CheckSent = Callable[[str, Case, list[float], list[float]], None]  # where, case, gradient, sent
SIZES = [Case(n, seed=n) for n in (41, 5, 2, 1, 0)]
KINDS = [
    *(Case(23, dtype, seed=3) for dtype in ("float64", "bfloat16")),
    *(Case(23, kind=kind, seed=4) for kind in ("zeros", "equal", "strided")),
]
CASES = [*SIZES, *KINDS]


def check_cases(
    grade: Grade, how: How, cases: Sequence[Case], num_ranks: int, check_sent: CheckSent
) -> None:
    """Reduce gradients on so many ranks, and check what comes out."""
    cases, by_rank = reduced(grade, how, cases, num_ranks)
    check_reduced(by_rank, how, cases, check_sent)


def reduced(
    grade: Grade, how: How, cases: Sequence[Case], num_ranks: int
) -> tuple[Sequence[Case], list[Any]]:
    """Reduce gradients of other numbers each time; return the cases, and what comes out."""
    cases = [case._replace(seed=case.seed + grade.random.randrange(10**6)) for case in cases]
    options = uneven(grade.random, num_ranks)
    run = grade.run(b.reduce_all, num_ranks, how, cases, options=options, if_stuck=STUCK)
    return cases, run.results


def check_in_group(grade: Grade, how: How, cases: Sequence[Case], check_sent: CheckSent) -> None:
    """The same inside a group whose ranks have other numbers in the world."""
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.reduce_all, how, cases), if_stuck=STUCK_IN_GROUP
    )
    check_reduced(of_members(run), how, cases, check_sent)


def check_reduced(
    by_rank: Sequence[Any], how: How, cases: Sequence[Case], check_sent: CheckSent
) -> None:
    """Check shapes, what was sent, that it averages to the mean, and that the ranks agree."""
    num_ranks = len(by_rank)
    for place, case in enumerate(cases):
        found = [of_rank[place] for of_rank in by_rank]
        told = f"{how.name} of {case}"
        for rank, one in enumerate(found):
            where = f"{told}, rank {rank} of {num_ranks}"
            _check_kinds(where, case, one)
            gradient = b.gradient_of(case, rank, num_ranks).double().tolist()
            check_sent(where, case, gradient, one["sent"])
        _check_mean(told, how, case, found)


def _check_kinds(where: str, case: Case, one: Any) -> None:
    wanted = (case.dtype, (case.n,))
    for what, kind in zip(("mean", "sent"), one["kinds"], strict=True):
        check(
            kind == wanted,
            f"{where}: {what} should have the gradient's dtype and shape, {_kind(wanted)}; it has "
            f"{_kind(kind)}.",
        )
    check(
        not one["changed"],
        f"{where}: the gradient was changed. It is the caller's: what is summed in place must be a "
        "copy.",
    )


def _kind(kind: Any) -> str:
    return f"{kind[0]} {tuple(kind[1])}"


def _check_mean(told: str, how: How, case: Case, found: Sequence[Any]) -> None:
    num_ranks, first = len(found), found[0]["mean"]
    sums = [sum(column) for column in zip(*(one["sent"] for one in found), strict=True)]
    mean = [total / num_ranks for total in sums]
    most = max((abs(x) for one in found for x in one["sent"]), default=0.0)
    slack = EPSILON[case.dtype] * most
    for rank, one in enumerate(found):
        got, where = one["mean"], f"{told}, rank {rank} of {num_ranks}"
        check(
            is_close(got, mean, slack),
            f"{where}: the ranks' `sent` average to {short_beside(mean, got)}, but mean is "
            f"{short_beside(got, mean)}. {_why(how, got, mean, sums, one['sent'], slack)}",
        )
        check(
            got == first,
            f"{where}: mean differs from rank 0's in {sum(map(_differ, got, first))} of "
            f"{len(got)} entries, perhaps only in the last bits. Add in the same order on all "
            "ranks, and let all of them decode the same bytes, or their models drift apart.",
        )


def _differ(a: float, other: float) -> bool:
    return a != other


def _why(how: How, got: Any, mean: Any, sums: Any, sent: Any, slack: float) -> str:
    if is_close(got, sums, slack * len(sums)) and distance(sums, mean) > slack:
        return "That is the sum: divide by the number of ranks."
    if is_close(got, sent, slack):
        return "That is what this rank has sent: where do the others' values come in?"
    if how.name == "quantized":
        return (
            "A rank has sent what its codes stand for. If the second rounding takes d from the "
            "mean of a chunk, its owner has sent N · d less, in its own chunk: what is lost "
            "otherwise never comes again."
        )
    return (
        "What travels counts as sent, and nothing else. Each rank's values belong to its own "
        "places, and the sum is divided by the number of ranks, once."
    )


def check_bytes(run: Run, most: float, what: str) -> None:
    """Check that no rank has sent more than ``most`` bytes, but for a little."""
    num_ranks = len(run.bytes_sent)
    for rank, sent in enumerate(run.bytes_sent):
        check(
            sent <= most + LITTLE_BYTES * (num_ranks - 1),
            f"rank {rank} of {num_ranks} sent {sent:,.0f} bytes; {most:,.0f} are enough: {what}",
        )


def check_nan_travels(by_rank: Sequence[Any], how: How, n: int) -> None:
    """Check that all ranks see the NaN of one of them."""
    for rank, (found,) in enumerate(by_rank):
        check(
            isnan(found["mean"][n // 2]),
            f"{how.name}: entry {n // 2} of the last rank's gradient is NaN, but the mean there is "
            f"{found['mean'][n // 2]:g} on rank {rank}. A NaN must travel, or the ranks train on "
            "while one of them is broken. Comparisons with NaN are always false.",
        )


def check_training(run: Run, n: int, tolerance: float, what: str) -> None:
    """Check that all ranks have come to the mean of their targets."""
    num_ranks = len(run.results)
    all_targets = [b.targets(n, rank, num_ranks).tolist() for rank in range(num_ranks)]
    wanted = [sum(column) / num_ranks for column in zip(*all_targets, strict=True)]
    for rank, x in enumerate(run.results):
        check(
            x == run.results[0],
            f"rank {rank} of {num_ranks} has trained other parameters than rank 0: "
            f"{short_beside(x, run.results[0])}, not {short_beside(run.results[0], x)}. The mean "
            "must have the same bits on all ranks.",
        )
        off = max((abs(a - w) for a, w in zip(x, wanted, strict=True)), default=inf)
        off = inf if isnan(off) else off
        check(
            off <= tolerance,
            f"{num_ranks} ranks train {n} parameters for {what}, with error feedback: rank {rank} "
            f"ends {off:.3g} away from the best ones, {short(wanted)}; {tolerance} is allowed. "
            "What is not sent must be added to the next gradient, once.",
        )
