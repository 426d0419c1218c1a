"""The contract of every compressor: sent and mean belong together, on all ranks, in few bytes."""

from collections.abc import Callable, Sequence
from math import inf, isnan
from typing import Any, NamedTuple

from distlab.grade import Grade, check
from distlab.sim import Options
from judging.checks import distance, is_close, short, short_beside, uneven
from judging.expect import expect, results_in_group
from phase4 import compressors as b
from phase4.compressors import Case, How

RING = Options(algorithm="ring")  # algorithm of all-reduces and all-gathers
LITTLE_BYTES = 16  # allowance for lengths and scales, to each other rank
EPSILON = {"float32": 1e-6, "float64": 1e-6, "bfloat16": 1e-2}
STUCK = (
    "All ranks call the same collectives in the same order, with tensors of the same length: agree "
    "on the length first where it depends on a rank's own values, also where it is 0."
)
CheckSent = Callable[[str, Case, list[float], list[float]], None]  # (where, case, gradient, sent)
CASES = [
    *(Case(n, seed=n) for n in (41, 5, 2, 1, 0)),
    *(Case(23, dtype, seed=3) for dtype in ("float64", "bfloat16")),
    *(Case(23, kind=kind, seed=4) for kind in ("zeros", "equal", "strided")),
]
NUM_STEPS, NUM_PARAMETERS = 300, 12
FAR = 2**24 + 1  # a place that float32 can't tell from its neighbours


class Compressor(NamedTuple):
    """A function with its argument, and the check of what each rank has sent.

    Attributes:
        how: Function and argument.
        check_sent: Check of what a rank has sent of a gradient.
        cases: Gradients to be reduced.
        if_apart: Likely cause where the ranks' means differ.
    """

    how: How
    check_sent: CheckSent
    cases: Sequence[Case] = CASES
    if_apart: str = (
        "Add in the same order on all ranks, and let all of them decode the same bytes, or their "
        "models drift apart."
    )

    def check(self, grade: Grade, num_ranks: int) -> None:
        """Reduce gradients of each case, with other numbers each time."""
        cases = [
            case._replace(seed=case.seed + grade.random.randrange(10**6)) for case in self.cases
        ]
        options = uneven(grade.random, num_ranks)
        run = grade.run(b.reduce_all, num_ranks, self.how, cases, options=options, if_stuck=STUCK)
        self._check_all(run.results, cases)

    def check_in_group(self, grade: Grade) -> None:
        """Reduce gradients inside a group whose ranks have other numbers in the world."""
        results = results_in_group(grade, b.reduce_all, self.how, self.cases)
        self._check_all(results, self.cases)

    def _check_all(self, by_rank: Sequence[Any], cases: Sequence[Case]) -> None:
        num_ranks = len(by_rank)
        for place, case in enumerate(cases):
            results = [of_rank[place] for of_rank in by_rank]
            what = f"{self.how.name} of {case}"
            check_reduced(what, results, case.dtype, case.n, self.if_apart)
            for rank, result in enumerate(results):
                gradient = b.gradient_of(case, rank, num_ranks).double().tolist()
                where = f"{what}, rank {rank} of {num_ranks}"
                self.check_sent(where, case, gradient, result["sent"])
            check_mean(what, results, EPSILON[case.dtype], self.how.name == "quantized")

    def check_bytes(self, grade: Grade, num_ranks: int, case: Case, most: float, what: str) -> None:
        """Check that no rank sends more than ``most`` bytes, but for a little."""
        args = self.how, [case]
        run = grade.run(b.reduce_all, num_ranks, *args, options=RING, if_stuck=STUCK)
        for rank, sent in enumerate(run.bytes_sent):
            check(
                sent <= most + LITTLE_BYTES * (num_ranks - 1),
                f"{self.how.name} of {case}: rank {rank} of {num_ranks} sent {sent:,.0f} bytes; "
                f"{most:,.0f} are enough: {what}",
            )

    def check_nan(self, grade: Grade) -> None:
        """Check that all ranks see the NaN of one of them."""
        n = 20
        run = grade.run(b.reduce_all, 3, self.how, [Case(n, kind="nan")], if_stuck=STUCK)
        for rank, (result,) in enumerate(run.results):
            check(
                isnan(result["mean"][n // 2]),
                f"{self.how.name}: entry {n // 2} of the last rank's gradient is NaN, but the mean "
                f"there is {result['mean'][n // 2]:g} on rank {rank}. A NaN must travel, or the "
                "ranks train on while one of them is broken. Comparisons with NaN are always "
                "false.",
            )

    def check_far_places(self, grade: Grade) -> None:
        """Check that a place beyond 2^24 arrives."""
        results = grade.call(b.reduce_long, self.how, FAR + 2, FAR)
        expect(
            f"{self.how.name} of {FAR + 2:,} entries, all 0 but one: its place in mean and sent",
            *(results, [[FAR], [FAR]]),
            "Indices of 4 bytes are int32: float32 knows no odd number above 2^24.",
        )

    def check_training(
        self, grade: Grade, num_ranks: int, tolerance: float, feedback: str = "own"
    ) -> None:
        """Check that all ranks come to the mean of their targets, with error feedback."""
        n, name = NUM_PARAMETERS, self.how.name
        args = self.how, n, NUM_STEPS, feedback
        by_rank = grade.run(b.train, num_ranks, *args, if_stuck=STUCK).results
        targets = [b.targets(n, rank, num_ranks).tolist() for rank in range(num_ranks)]
        best = [sum(column) / num_ranks for column in zip(*targets, strict=True)]
        for rank, x in enumerate(by_rank):
            what = f"after training with {name}, the parameters of rank {rank} of {num_ranks}"
            expect(what, x, by_rank[0], "The mean must have the same bits on all ranks.")
            off = max((abs(a - w) for a, w in zip(x, best, strict=True)), default=inf)
            check(
                off <= tolerance,
                f"{num_ranks} ranks train {n} parameters for {NUM_STEPS} steps with {name} and "
                f"error feedback: rank {rank} ends {off:.3g} away from the best ones, "
                f"{short(best)}; {tolerance} is allowed. What is not sent must be added to the "
                "next gradient, once.",
            )


def check_reduced(what: str, by_rank: Sequence[Any], dtype: str, n: int, if_apart: str) -> None:
    """Check dtype and shape, that the gradient is unchanged, and that all means are the same."""
    for rank, result in enumerate(by_rank):
        where = f"{what}, rank {rank} of {len(by_rank)}"
        for name, kind in zip(("mean", "sent"), result["kinds"], strict=True):
            expect(f"{where}: dtype and shape of {name}", kind, [dtype, [n]], "As the gradient's.")
        check(
            not result["changed"],
            f"{where}: the gradient was changed. It is the caller's: all_reduce, /= and copy_ "
            "write into their tensor, so what is summed in place must be a copy.",
        )
        mean, first = result["mean"], by_rank[0]["mean"]
        differ = sum(
            x != y and not (isnan(x) and isnan(y)) for x, y in zip(mean, first, strict=True)
        )
        check(
            not differ,
            f"{where}: mean differs from rank 0's in {differ} of {len(mean)} entries, perhaps only "
            f"in the last bits. {if_apart}",
        )


def check_mean(
    what: str, by_rank: Sequence[Any], epsilon: float, is_rounded_twice: bool = False
) -> None:
    """Check that the mean is that of what the ranks have sent."""
    num_ranks = len(by_rank)
    sums = [sum(column) for column in zip(*(result["sent"] for result in by_rank), strict=True)]
    right = [total / num_ranks for total in sums]
    most = max((abs(x) for result in by_rank for x in result["sent"]), default=0.0)
    slack = epsilon * most
    for rank, result in enumerate(by_rank):
        mean = result["mean"]
        check(
            is_close(mean, right, slack),
            f"{what}, rank {rank} of {num_ranks}: the ranks' `sent` average to "
            f"{short_beside(right, mean)}, but mean is {short_beside(mean, right)}. "
            f"{_why_not(result, sums, right, slack, is_rounded_twice)}",
        )


def _why_not(result: Any, sums: Any, right: Any, slack: float, is_rounded_twice: bool) -> str:
    if is_close(result["mean"], sums, slack * 9) and distance(sums, right) > slack:
        return "That is the sum: divide by the number of ranks."
    if is_close(result["mean"], result["sent"], slack):
        return "That is what this rank has sent: where do the others' values come in?"
    if is_rounded_twice:
        return (
            "A rank has sent what its codes stand for. If the second rounding takes d from the "
            "mean of a chunk, its owner has sent N · d less, in its own chunk: what is lost "
            "otherwise never comes again."
        )
    return (
        "What travels counts as sent, and nothing else. Each rank's values belong to its own "
        "places, and the sum is divided by the number of ranks, once."
    )
