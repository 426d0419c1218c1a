"""The contract of all compressors as data, and the tests that check an answer against it.

Every compressor promises that the mean it returns is the mean of what the ranks send, that this
mean is the same on all ranks, bit for bit, and that few bytes are sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from random import Random
from typing import Any

from distlab.grade import Grade, check, check_cost, task
from distlab.sim import Options
from judging.checks import distance, is_close, short_beside, uneven
from judging.expect import expect, over, results_in_group
from phase4 import compressors as b
from phase4.compressors import Case, How

RING = Options(algorithm="ring")  # algorithm of all-reduces and all-gathers
LITTLE_BYTES = 16  # allowance for lengths and scales, per other rank
EPSILON = {"float32": 1e-6, "float64": 1e-6, "bfloat16": 1e-2}
STUCK = (
    "All ranks call the same collectives in the same order, with tensors of the same length: agree "
    "on the length first where it depends on a rank's own values, also where it is 0."
)
NOT_SCALED = (
    "Don't scale by n/k: what is not sent stays in the residual, and is sent in a later step."
)
Numbers = list[float]
CASES = (
    *(Case(n, seed=n) for n in (41, 5, 1, 0)),
    *(Case(23, dtype, seed=3) for dtype in ("float64", "bfloat16")),
    *(Case(23, kind=kind, seed=4) for kind in ("zeros", "equal", "strided")),
)
FAR = 2**24 + 1  # an index that float32 cannot represent


def draw_numbers(random: Random, case: Case, num_ranks: int, argument: Any) -> Case:
    """Return the same case, but with new random numbers."""
    del num_ranks, argument
    return case._replace(seed=case.seed + random.randrange(10**6))


@dataclass(frozen=True)
class Compressor:
    """A function that averages gradients in compressed form, and its task's promises."""

    task: str  # number of its task
    name: str  # name of the function
    worlds: Sequence[tuple[int, Any]]  # numbers of ranks, each with the argument of the function
    # Checks what a rank sent. The arguments are a description of rank and case, the function's
    # argument, the case, the gradients of all ranks, the rank and what it sent.
    check_sent: Callable[[str, Any, Case, Sequence[Numbers], int, Numbers], None]
    # Calls whose bytes are counted: the number of ranks, the function's argument and the gradient.
    costs: Sequence[tuple[int, Any, Case]]
    # Returns, for one of these calls, how many bytes a rank may send, and what they are for.
    most_bytes: Callable[[int, Any, Case], tuple[float, str]]
    cases: Sequence[Case] = CASES  # gradients to be reduced
    # An argument with which the only nonzero entry of a long gradient is sent, or None if the
    # function sends no indices.
    far: Any = None
    # The likely cause if the ranks' means differ.
    if_apart: str = (
        "Add in the same order on all ranks, and let all of them decode the same bytes, or their "
        "models drift apart."
    )
    # Gives a case new random numbers.
    draw: Callable[[Random, Case, int, Any], Case] = draw_numbers

    def tests(self) -> dict[str, Callable[..., None]]:
        """Return the tests by name, marked as tests of the task."""
        tests = {
            "averages_what_ranks_send": over(self.worlds, self._test_world, ids=str),
            "on_processes": over(self.worlds[-1:], self._test_world, ids=str),
            "sends_few_bytes": over(self.costs, self._test_bytes, ids=str),
            "inside_a_group": over(self.worlds[-1:], self._test_group, ids=str),
        }
        if self.far is not None:
            tests["of_odd_gradients"] = over([self.worlds[-1]], self._test_odd, ids=str)
        return {
            f"test_{self.name}_{promise}": task(self.task, real=promise == "on_processes")(test)
            for promise, test in tests.items()
        }

    def _test_world(self, grade: Grade, world: tuple[int, Any]) -> None:
        n, argument = world
        cases = [self.draw(grade.random, case, n, argument) for case in self.cases]
        options = uneven(grade.random, n)
        run = grade.run(
            b.reduce_all, n, How(self.name, argument), cases, options=options, if_stuck=STUCK
        )
        self._check_all(run.results, argument, cases)

    def _test_group(self, grade: Grade, world: tuple[int, Any]) -> None:
        n, argument = 3, world[1]
        cases = [self.draw(grade.random, case, n, argument) for case in self.cases]
        results = results_in_group(grade, b.reduce_all, How(self.name, argument), cases)
        self._check_all(results, argument, cases)

    def _check_all(self, by_rank: Sequence[Any], argument: Any, cases: Sequence[Case]) -> None:
        n = len(by_rank)
        for place, case in enumerate(cases):
            results = [of_rank[place] for of_rank in by_rank]
            what = f"{self.name} of {case}"
            check_reduced(what, results, case.dtype, case.n, self.if_apart)
            gradients = [b.gradient_of(case, rank, n).double().tolist() for rank in range(n)]
            for rank, result in enumerate(results):
                where = f"{what}, rank {rank} of {n}"
                self.check_sent(where, argument, case, gradients, rank, result["sent"])
            check_mean(what, results, EPSILON[case.dtype])

    def _test_bytes(self, grade: Grade, cost: tuple[int, Any, Case]) -> None:
        n, argument, case = cost
        how, (most, what) = How(self.name, argument), self.most_bytes(*cost)
        run = grade.run(b.reduce_all, n, how, [case], options=RING, if_stuck=STUCK)
        for rank, sent in enumerate(run.bytes_sent):
            check_cost(
                sent <= most + LITTLE_BYTES * (n - 1),
                f"{self.name} of {case}: rank {rank} of {n} sent {sent:,.0f} bytes; {most:,.0f} "
                f"are enough: {what}",
            )

    def _test_odd(self, grade: Grade, world: tuple[int, Any]) -> None:
        """Check that all ranks see one rank's NaN, and that an index beyond 2^24 arrives."""
        n, how = 20, How(self.name, world[1])
        run = grade.run(b.reduce_all, 3, how, [Case(n, kind="nan")], if_stuck=STUCK)
        for rank, (result,) in enumerate(run.results):
            check(
                isnan(result["mean"][n // 2]),
                f"{self.name}: entry {n // 2} of the last rank's gradient is NaN, but the mean "
                f"there is {result['mean'][n // 2]:g} on rank {rank}. A NaN must travel, or the "
                "ranks train on while one of them is broken. Comparisons with NaN are always "
                "false.",
            )
        expect(
            f"{self.name} of {FAR + 2:,} entries, all 0 but one: its place in mean and sent",
            *(grade.call(b.reduce_long, How(self.name, self.far), FAR + 2, FAR), [[FAR], [FAR]]),
            "Indices of 4 bytes are int32: float32 knows no odd number above 2^24.",
        )


def check_reduced(what: str, by_rank: Sequence[Any], dtype: str, n: int, if_apart: str) -> None:
    """Check dtypes and shapes, that gradients are unchanged, and that all means are the same."""
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


def check_mean(what: str, by_rank: Sequence[Any], epsilon: float) -> None:
    """Check that the returned mean is the mean of what the ranks have sent."""
    num_ranks = len(by_rank)
    sums = [sum(column) for column in zip(*(result["sent"] for result in by_rank), strict=True)]
    right = [total / num_ranks for total in sums]
    slack = epsilon * max((abs(x) for result in by_rank for x in result["sent"]), default=0.0)
    for rank, result in enumerate(by_rank):
        mean = result["mean"]
        check(
            is_close(mean, right, slack),
            f"{what}, rank {rank} of {num_ranks}: the ranks' `sent` average to "
            f"{short_beside(right, mean)}, but mean is {short_beside(mean, right)}. "
            f"{_why_not(result, sums, right, slack)}",
        )


def factor_of(found: Numbers, right: Numbers) -> float | None:
    """Return the factor above 1 by which all numbers are too large, or None if there is none."""
    pairs = [(x, y) for x, y in zip(found, right, strict=True) if x or y]
    if not pairs or not all(x * y > 0 and isfinite(x) for x, y in pairs):
        return None
    ratios = [x / y for x, y in pairs]
    is_scaled = min(ratios) > 1.01 and max(ratios) < 1.01 * min(ratios)
    return ratios[0] if is_scaled else None


def _why_not(result: Any, sums: Any, right: Any, slack: float) -> str:
    if is_close(result["mean"], sums, slack * 9) and distance(sums, right) > slack:
        return "That is the sum: divide by the number of ranks."
    if is_close(result["mean"], result["sent"], slack):
        return "That is what this rank has sent: where do the others' values come in?"
    if (factor := factor_of(result["mean"], right)) is not None:
        return f"Each entry is {factor:.4g} times as large. {NOT_SCALED}"
    return (
        "What travels counts as sent, and nothing else. Each rank's values belong to its own "
        "places, and the sum is divided by the number of ranks, once."
    )
