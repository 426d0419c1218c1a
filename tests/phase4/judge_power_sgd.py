"""Judges task 4.12: low-rank means, their bytes, progress over steps, and orthonormal columns."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from distlab.grade import Grade, Run, check, task
from judging.checks import short_beside, uneven
from judging.expect import expect, expect_cost, results_in_group
from phase4 import low_ranks as b
from phase4.compressor_contract import check_mean, check_reduced
from phase4.low_ranks import MIXED, NOT_WORTH_IT, Plan

TOLERANCES = {"float32": 2e-4, "float64": 1e-9}  # relative to the largest value
STUCK = (
    "All ranks call the same all-reduces in the same order: what is compressed depends on the "
    "shapes alone, which all ranks know."
)


APART = (
    "Each rank needs the same first Q (from the seed and the name, not from a generator that "
    "others use too), and keeps the Q that was averaged, not its own."
)


def _average(grade: Grade, n: int, plan: Plan) -> None:
    run = grade.run(b.average, n, plan, options=uneven(grade.random, n), if_stuck=STUCK)
    if grade.is_simulated:
        _check_cost(run, plan)
    _check_results(plan, run.results)


def _check_results(plan: Plan, by_rank: Sequence[Any], where: str = "") -> None:
    """Check the results of all steps, gradient by gradient."""
    n, sizes = len(by_rank), [torch.Size(shape).numel() for shape in plan.shapes.values()]
    for step in range(plan.steps):
        of_ranks = [b.gradients_of(plan, rank, step, n) for rank in range(n)]
        results = [of_rank[step] for of_rank in by_rank]
        here = f"{where}PowerSGD, step {step}"
        check_reduced(here, results, plan.dtype, sum(sizes), APART)
        check_mean(here, results, TOLERANCES[plan.dtype])
        means, sents = (
            [torch.tensor(r[what], dtype=torch.float64).split(sizes) for r in results]
            for what in ("mean", "sent")
        )
        for place, (name, shape) in enumerate(plan.shapes.items()):
            gradients = [of_rank[name].double() for of_rank in of_ranks]
            what = f"{here} on {n} ranks: {name}"
            is_low = _is_compressed(shape, plan.rank)
            check_sent = _check_projected if is_low else _check_whole
            for rank, (gradient, of_rank) in enumerate(zip(gradients, sents, strict=True)):
                check_sent(plan, gradient, of_rank[place].view(shape), f"{what} on rank {rank}")
            # The step after zero gradients is left to test_a_q_of_zeros_is_not_kept.
            if not is_low or (plan.low_rank and step != plan.zero_step + 1):
                _check_exact(plan, gradients, means[0][place].view(shape), what, is_low)


def _is_compressed(shape: Sequence[int], r: int) -> bool:
    if len(shape) < 2:
        return False
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    return r * (rows + columns) < rows * columns


def _check_whole(plan: Plan, gradient: Tensor, sent: Tensor, here: str) -> None:
    what = f"{here}, which is not compressed with r = {plan.rank}, in sent"
    expect(what, sent.flatten().tolist(), gradient.flatten().tolist(), "All of it is sent.")


def _check_projected(plan: Plan, gradient: Tensor, sent: Tensor, here: str) -> None:
    """Check that a rank sent the projection of its gradient onto r directions."""
    tolerance = TOLERANCES[plan.dtype]
    part, whole = sent.flatten(1), gradient.flatten(1)
    largest = float(whole.norm())
    rank_of_sent = int((torch.linalg.svdvals(part) > 1e3 * tolerance * largest).sum())
    check(
        rank_of_sent <= plan.rank,
        f"{here}: sent should be a product of factors with r = {plan.rank} columns, so of rank "
        f"{plan.rank} at most; its rank is {rank_of_sent}.",
    )
    off = float((part.T @ (whole - part)).norm()) / max(largest**2, 1e-30)
    check(
        off <= 10 * tolerance,
        f"{here}: what is sent and what is left, M - sent, should be at right angles, column "
        f"by column; sentᵀ (M - sent) has {off:.2g} of the norm of MᵀM. sent is P (M_wᵀ P)ᵀ, "
        "with this rank's own M_w: orthogonalize P after the all-reduce, and before Mᵀ P.",
    )


def _check_exact(
    plan: Plan, gradients: Sequence[Tensor], mean: Tensor, what: str, is_low: bool
) -> None:
    """Check that the mean is that of the gradients, up to rounding."""
    right = sum(gradients[1:], gradients[0]) / len(gradients)
    largest = max((float(g.abs().max()) for g in gradients if g.numel()), default=0)
    first, wanted = ([*x.flatten()[:3].tolist()] for x in (mean, right))
    kind = f"of rank {plan.low_rank}" if is_low else "which is not compressed"
    cause = (
        "P is the mean of all M Q first, and becomes orthonormal after that."
        if is_low
        else "It is divided by the number of ranks, and travels with P, in the same all-reduce."
    )
    check(
        bool(((mean - right).abs() <= TOLERANCES[plan.dtype] * largest + 1e-30).all()),
        f"{what}, {kind} with r = {plan.rank}, in mean should be {short_beside(wanted, first)}; it "
        f"is {short_beside(first, wanted)}. {cause}",
    )


# Sent values and their means


@task("4.12", real=True)
def test_ranks_average_pieces_of_all_shapes(grade: Grade) -> None:
    _average(grade, 3, Plan(MIXED))


WORLDS = {  # number of ranks, and plan; with a rank of 3, float32 may lose all but three digits
    "one rank": (1, Plan(MIXED, rank=3)),
    "five ranks": (5, Plan(MIXED, rank=1, dtype="float64")),
    "nothing worth compressing": (3, Plan(NOT_WORTH_IT, steps=2)),
    "a mean of rank 1": (3, Plan(MIXED, rank=3, low_rank=1, dtype="float64")),
    "a mean of rank 3": (2, Plan(MIXED, rank=3, low_rank=3, dtype="float64")),
    "zeros in step 0": (2, Plan(MIXED, steps=3, zero_step=0, low_rank=1)),
    "zeros in step 1": (2, Plan(MIXED, steps=4, zero_step=1, low_rank=1)),
}


@task("4.12")
@pytest.mark.parametrize("what", WORLDS)
def test_low_rank_in_other_worlds(grade: Grade, what: str) -> None:
    _average(grade, *WORLDS[what])


@task("4.12")
def test_low_rank_inside_a_group(grade: Grade) -> None:
    plan = Plan(MIXED)
    _check_results(plan, results_in_group(grade, b.average, plan), "inside a group, ")


def _check_cost(run: Run, plan: Plan) -> None:
    right = _bytes_of(plan) * plan.steps
    events = run.trace.events if run.trace else []
    for rank in range(len(run.results)):
        calls = [e for e in events if e.rank == rank and e.kind == "collective"]
        sizes = [e.num_bytes for e in sorted(calls, key=lambda e: e.start_s)]
        expect_cost(
            f"rank {rank} of {len(run.results)}, r = {plan.rank}, {plan.dtype}: the bytes of the "
            f"all-reduces of {plan.steps} steps",
            *(sizes, right),
            "In each step, all P and what is not compressed, then all Q: put what travels together "
            "into one flat tensor. A piece is compressed if it has two dimensions or more and "
            "r (n + m) < n m, with n its first dimension and m all others together; its dtype "
            "stays.",
        )


def _bytes_of(plan: Plan) -> list[int]:
    first = second = 0
    for shape in plan.shapes.values():
        rows, columns = (*shape, 1)[0], torch.Size(shape[1:]).numel()
        is_compressed = _is_compressed(shape, plan.rank)
        first += plan.rank * rows if is_compressed else torch.Size(shape).numel()
        second += plan.rank * columns if is_compressed else 0
    sizes = [first, second] if second else [first]
    return [size * getattr(torch, plan.dtype).itemsize for size in sizes]


# From step to step


@task("4.12")
def test_the_same_matrix_gets_better_and_better(grade: Grade) -> None:
    factor, steps = grade.random.uniform(0.75, 0.85), 36
    best = float(torch.linalg.svdvals(b.falling(b.MATRIX, factor))[2:].norm())
    for errors in grade.call(b.repeat_matrices, factor, steps).values():
        check(
            errors[-1] <= 1.001 * best,
            f"two matrices, {steps} times, with r = 2: the error of each should fall to {best:.4f},"
            f" the least that any product of rank 2 has. It is {errors[0]:.4f} after the first "
            f"step and {errors[-1]:.4f} after the last. Begin each step with the Q of the step "
            "before, and keep it under the name of the parameter, whose place changes; a step may "
            "leave it out.",
        )


@task("4.12")
def test_a_q_of_zeros_is_not_kept(grade: Grade) -> None:
    for before, error in grade.call(b.turn_again, 3).items():
        check(
            error <= 1e-3,
            f"PowerSGD with r = 2: first {before}, and then three times the same matrix of rank "
            f"2, whose first {b.ROWS_OF_ZEROS} rows are zero. The last mean should be that matrix, "
            f"and is {error:.0%} off. Where a column of Q is zero, so is that of P = M Q; "
            "orthogonalize makes a unit vector of it, which may point to a row of zeros, so Mᵀ P "
            "is zero there again, in every later step. Leave a column of Q that would be zero as "
            "it was.",
        )


@task("4.12")
@pytest.mark.parametrize("spoiled", [0, 2])
def test_a_nan_spoils_no_later_step(grade: Grade, spoiled: int) -> None:
    for rank, facts in enumerate(grade.run(b.spoil_a_step, 2, Plan(MIXED), spoiled).results):
        mean = facts["with"].pop(spoiled)
        here = f"rank {rank} of 2, step {spoiled} with a NaN in each matrix of rank 0"
        check(
            not all(map(math.isfinite, mean)),
            f"{here}: its mean should not be finite, so that all ranks notice; it is.",
        )
        check(
            facts["with"] == facts["without"],
            f"{here}: training skips it, and the steps after it should give the same bits as "
            "without it; they give others. A Q that is not finite makes all later means so, and "
            "with another Q they differ: keep that of the step before.",
        )


@task("4.12")
def test_the_first_q_depends_on_seed_and_name(grade: Grade) -> None:
    for rank, facts in enumerate(grade.run(b.begin, 2).results):
        means = facts["means"]
        for how, mean in means.items():
            is_same = how not in ("with the seed 7", "with another name")
            check(
                (mean == means["by default"]) == is_same,
                f"rank {rank} of 2: the first step {how} should give "
                f"{'the same bits as' if is_same else 'another mean than'} one by default. Draw Q "
                "from a generator of your own, with a seed made of seed (0 by default) and name. "
                "A generator on the CPU takes only the low 32 bits of its seed. What is loaded "
                "takes the place of what was there.",
            )
        check(
            facts["is left alone"],
            f"rank {rank} of 2: after first steps, torch's own generator is in another state, so "
            "that dropout and shuffling differ from those of a run without compression. Draw Q "
            "with generator=torch.Generator().manual_seed(…).",
        )


@task("4.12")
def test_the_first_q_is_the_same_in_all_processes(grade: Grade) -> None:
    here, elsewhere = grade.call(b.begin_elsewhere)
    check(
        here == elsewhere,
        "a first step with the same seed and name gives another mean in another process (the test "
        "changes what hash returns for a text, as a new process does). Python's hash of a text "
        "differs from process to process, so each rank would begin with a Q of its own. zlib.crc32 "
        "of the encoded text is the same everywhere.",
    )


@task("4.12")
def test_a_loaded_state_goes_on_bit_for_bit(grade: Grade) -> None:
    run = grade.run(b.go_on, 3, Plan(MIXED, steps=5), 2, if_stuck=STUCK)
    for rank, facts in enumerate(run.results):
        right = facts.pop("without a stop")
        for how, steps in facts.items():
            check(
                steps == right,
                f"rank {rank} of 3, {how}: steps 2 to 4 should give the same bits as without a "
                "stop, and give others. The state is the Q of each parameter: a copy, because "
                "later steps may write into what they use; and loading makes a copy as well.",
            )


# orthogonalize


@task("4.12")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_columns_become_orthonormal(grade: Grade, dtype: str) -> None:
    most = 1e-5 if dtype == "float32" else 1e-12
    for what, facts in grade.call(b.orthogonalize, dtype).items():
        off, lost = facts["not orthonormal"], facts["lost"]
        here = f"orthogonalize, {dtype}, a matrix {what}"
        check(
            off <= most,
            f"{here}: QᵀQ should be 1 on the diagonal and 0 beside it, and is off by {off:.2g}. "
            "It works in place. What is left of a column that depends on those before it is "
            "rounding: divided by its norm, it points anywhere, or is NaN. torch.linalg.qr gives "
            "orthonormal columns there, too.",
        )
        check(
            lost <= most,
            f"{here}: every column should be a sum of multiples of the new ones; {lost:.2g} of "
            "the largest number is not.",
        )
