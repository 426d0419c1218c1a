"""Judges task 4.12: what travels, what comes of it, step by step, and orthonormal columns."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from distlab.grade import Grade, Run, check, task
from judging.checks import of_members, short, short_beside, uneven
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase4 import low_ranks as b
from phase4.low_ranks import MATRIX, MIXED, NOT_WORTH_IT, Plan

SIZES = [1, 2, 3, 5, 8]
TOLERANCES = {"float32": 2e-4, "float64": 1e-9}  # of the greatest number
STUCK = (
    "All ranks call the same all-reduces in the same order: what is compressed depends on the "
    "shapes alone, which all ranks know."
)


def _average(grade: Grade, n: int, plan: Plan, *, has_cost: bool = False) -> None:
    run = grade.run(b.average, n, plan, options=uneven(grade.random, n), if_stuck=STUCK)
    if has_cost:
        _check_cost(run, plan)
    _check_results(plan, run.results)


def _check_results(plan: Plan, by_rank: Sequence[Any], where: str = "") -> None:
    """Check all that holds of any gradients."""
    n = len(by_rank)
    for step in range(plan.steps):
        gradients = [b.gradients_of(plan, rank, step, n) for rank in range(n)]
        found = [of_rank[step] for of_rank in by_rank]
        for rank, one in enumerate(found):
            here = f"{where}rank {rank} of {n}, step {step}"
            _check_kinds(plan, one, here)
            check(
                one["mean"] == found[0]["mean"],
                f"{here}: the mean should be that of rank 0 bit for bit, and differs. Each rank "
                "needs the same first Q (from the seed and the name, not from a generator that "
                "others use too), and keeps the Q that was averaged, not its own.",
            )
        means, sents = (_by_name(plan, [one[what] for one in found]) for what in ("mean", "sent"))
        for name in plan.shapes:
            here, own = f"{where}step {step} on {n} ranks, {name}", [g[name] for g in gradients]
            is_exact = plan.low_rank > 0 and step != plan.zero_step + 1  # which begins anew
            _check_piece(plan, name, own, means[name][0], sents[name], here, is_exact)


def _check_kinds(plan: Plan, found: Any, here: str) -> None:
    expected = ((sum(torch.Size(s).numel() for s in plan.shapes.values()),), f"torch.{plan.dtype}")
    for what, kind in zip(("mean", "sent"), found["kinds"], strict=True):
        check(
            kind == expected,
            f"{here}: {what} should be a tensor like the gradient, of shape {expected[0]} and "
            f"{expected[1]}; its shape is {kind[0]}, its dtype {kind[1]}.",
        )
    check(
        found["is_only_read"],
        f"{here}: the gradient was changed; it should only be read. all_reduce, /= and copy_ write "
        "into their tensor: is that a view of the gradient?",
    )


def _by_name(plan: Plan, by_rank: Sequence[list[float]]) -> dict[str, list[Tensor]]:
    """The parts of flat tensors, by name and then by rank."""
    sizes = [torch.Size(shape).numel() for shape in plan.shapes.values()]
    parts = [torch.tensor(flat, dtype=torch.float64).split(sizes) for flat in by_rank]
    return {
        name: [of_rank[place].view(shape) for of_rank in parts]
        for place, (name, shape) in enumerate(plan.shapes.items())
    }


def _check_piece(
    plan: Plan,
    name: str,
    own: Sequence[Tensor],
    mean: Tensor,
    sent: Sequence[Tensor],
    here: str,
    is_exact: bool,
) -> None:
    shape = plan.shapes[name]
    exact = sum(own[1:], own[0]) / len(own)
    of_sent = sum(sent[1:], sent[0]) / len(sent)
    check(
        _is_near(plan, of_sent, mean, own),
        f"{here}: the mean over the ranks of what they sent should be mean, "
        f"{_told(mean, of_sent)}; it is {_told(of_sent, mean)}. "
        f"{_why_not_sent(plan, mean, of_sent)}",
    )
    if _is_compressed(shape, plan.rank):
        for rank, (gradient, part) in enumerate(zip(own, sent, strict=True)):
            _check_projection(plan, gradient.double(), part, f"{here}, rank {rank}")
        if is_exact:
            check(
                _is_near(plan, mean, exact, own),
                f"{here}: the mean of the gradients has rank {plan.low_rank}, and r is "
                f"{plan.rank}: it should come out as it is, {_told(exact, mean)}; mean "
                f"is {_told(mean, exact)}. P is the mean of all M Q first, and becomes "
                "orthonormal after that.",
            )
        return
    check(
        _is_near(plan, mean, exact, own),
        f"{here} of shape {shape} is not compressed with r = {plan.rank}: its mean is "
        f"{_told(exact, mean)}, but mean holds {_told(mean, exact)}. "
        f"{_why_not_mean(plan, mean, exact, own)}",
    )
    for rank, (gradient, part) in enumerate(zip(own, sent, strict=True)):
        check(
            torch.equal(gradient.double(), part),
            f"{here} of shape {shape} is not compressed with r = {plan.rank}: rank {rank} sent all "
            f"of its gradient, {_told(gradient, part)}; sent holds {_told(part, gradient)}.",
        )


def _is_compressed(shape: Sequence[int], r: int) -> bool:
    if len(shape) < 2:
        return False
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    return r * (rows + columns) < rows * columns


def _is_near(plan: Plan, found: Tensor, wanted: Tensor, own: Sequence[Tensor]) -> bool:
    """Whether they differ by rounding alone, measured by the largest gradient."""
    largest = max([float(gradient.abs().max()) for gradient in own if gradient.numel()], default=0)
    return bool(((found - wanted).abs() <= TOLERANCES[plan.dtype] * largest + 1e-30).all())


def _told(tensor: Tensor, other: Tensor) -> str:
    """The first numbers, with as many digits as tell them from others."""
    first, others = ([*x.double().flatten()[:3].tolist()] for x in (tensor, other))
    return short_beside(first, others)


def _why_not_sent(plan: Plan, mean: Tensor, of_sent: Tensor) -> str:
    ratio = float((mean * of_sent).sum() / (of_sent * of_sent).sum().clamp(min=1e-30))
    if ratio != 1 and _is_near(plan, mean, ratio * of_sent, [mean]):
        return (
            f"mean is {ratio:.3g} times as large: divide the sum by the number of ranks of the "
            "group."
        )
    return (
        "sent is P (M_wᵀ P)ᵀ, with this rank's own M_w, and the P that was averaged and is "
        "orthonormal; of what is not compressed, all."
    )


def _why_not_mean(plan: Plan, mean: Tensor, exact: Tensor, own: Sequence[Tensor]) -> str:
    if len(own) > 1 and _is_near(plan, mean, len(own) * exact, own):
        return "That is the sum: divide by the number of ranks of the group."
    return "It travels with P, in the same all-reduce."


def _check_projection(plan: Plan, gradient: Tensor, sent: Tensor, here: str) -> None:
    """Check that what was sent is the gradient's projection onto r directions."""
    part, whole = sent.flatten(1), gradient.flatten(1)
    largest = float(whole.norm())
    rank = int((torch.linalg.svdvals(part) > 1e3 * TOLERANCES[plan.dtype] * largest).sum())
    check(
        rank <= plan.rank,
        f"{here}: sent should be a product of factors with r = {plan.rank} columns, so of rank "
        f"{plan.rank} at most; its rank is {rank}.",
    )
    off = float((part.T @ (whole - part)).norm()) / max(largest**2, 1e-30)
    check(
        off <= 10 * TOLERANCES[plan.dtype],
        f"{here}: what is sent and what is left, M - sent, should be at right angles, column by "
        f"column; sentᵀ (M - sent) has {off:.2g} of the norm of MᵀM. It is so if the columns of P "
        "are orthonormal: orthogonalize P after the all-reduce, and before Mᵀ P.",
    )


# What travels, and what comes of it


@task("4.12", real=True)
@pytest.mark.parametrize("n", [2, 3])
def test_ranks_average_pieces_of_all_shapes(grade: Grade, n: int) -> None:
    _average(grade, n, Plan(MIXED))


@task("4.12")
@pytest.mark.parametrize("n", [1, 5, 8])
def test_low_rank_on_any_number_of_ranks(grade: Grade, n: int) -> None:
    _average(grade, n, Plan(MIXED, rank=grade.random.choice([1, 3])))
    _average(grade, n, Plan(MIXED, steps=2, dtype="float64"))


@task("4.12")
@pytest.mark.parametrize("n", [2, 3, 8])
def test_two_all_reduces_and_their_bytes(grade: Grade, n: int) -> None:
    _average(grade, n, Plan(MIXED), has_cost=True)
    _average(grade, n, Plan(MIXED, rank=1, steps=1, dtype="float64"), has_cost=True)


def _check_cost(run: Run, plan: Plan) -> None:
    expected = _bytes_of(plan)
    events = run.trace.events if run.trace else []
    for rank in range(len(run.results)):
        calls = [e for e in events if e.rank == rank and e.kind == "collective"]
        found = [e.num_bytes for e in sorted(calls, key=lambda e: e.start_s)]
        check(
            found == expected * plan.steps,
            f"rank {rank} of {len(run.results)}, r = {plan.rank}, {plan.dtype}: the all-reduces of "
            f"a step should have {expected} bytes: all P and what is not compressed, then all Q. "
            f"In {plan.steps} steps, there were collectives of {short(found)} bytes. "
            f"{_why_not_bytes(found, plan)}",
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


def _why_not_bytes(found: Sequence[int], plan: Plan) -> str:
    if len(found) > 2 * plan.steps:
        return "Put what travels together into one flat tensor: torch.cat, one all-reduce, split."
    return (
        "A piece is compressed if it has two dimensions or more and r (n + m) < n m, with n its "
        "first dimension and m all others together; its dtype stays."
    )


@task("4.12")
def test_what_is_not_worth_it_takes_one_all_reduce(grade: Grade) -> None:
    _average(grade, 3, Plan(NOT_WORTH_IT), has_cost=True)


@task("4.12")
@pytest.mark.parametrize("low_rank", [1, 2, 3])
def test_a_mean_of_low_rank_is_exact(grade: Grade, low_rank: int) -> None:
    # in float64: with r = 3 and an unlucky first Q, float32 loses all but three digits
    _average(grade, 3, Plan(MIXED, rank=3, low_rank=low_rank, dtype="float64"))
    _average(grade, 2, Plan(MATRIX, rank=3, low_rank=low_rank, dtype="float64"))


@task("4.12")
def test_low_rank_inside_a_group(grade: Grade) -> None:
    plan = Plan(MIXED)
    run = grade.run(inside_group, OUTER_WORLD_SIZE, b.average, plan, if_stuck=STUCK_IN_GROUP)
    _check_results(plan, of_members(run), "inside a group, ")


# From step to step


@task("4.12")
def test_the_same_matrix_gets_better_and_better(grade: Grade) -> None:
    factor, steps = grade.random.uniform(0.75, 0.85), 25
    errors = grade.call(b.repeat_a_matrix, factor, steps)
    values = torch.linalg.svdvals(b.falling(MATRIX["weight"], factor))
    best = float(values[2:].norm())
    check(
        errors[-1] <= 1.001 * best,
        f"one matrix, {steps} times, with r = 2: the error should fall to {best:.4f}, the least "
        f"that any product of rank 2 has. It is {errors[0]:.4f} after the first step and "
        f"{errors[-1]:.4f} after the last. Begin each step with the Q of the step before.",
    )


@task("4.12")
def test_a_matrix_keeps_its_q_whatever_lies_beside_it(grade: Grade) -> None:
    for rank, (beside, alone) in enumerate(grade.run(b.change_neighbours, 2).results):
        far = max(abs(x - y) for x, y in zip(beside, alone, strict=True))
        check(
            far <= 1e-4 * max(map(abs, alone)),
            f"rank {rank} of 2: a parameter is averaged three times, beside another one of its "
            f"shape: once before it, once after it, once without it. Its mean should be that of "
            f"being alone each time, {short(alone[:3])}; it is {short(beside[:3])}. Keep Q under "
            "the name of the parameter: its place may change.",
        )


@task("4.12")
@pytest.mark.parametrize("zero_step", [0, 1])
def test_it_goes_on_after_a_gradient_of_zeros(grade: Grade, zero_step: int) -> None:
    _average(grade, 2, Plan(MIXED, steps=4, zero_step=zero_step, low_rank=1))


@task("4.12")
@pytest.mark.parametrize("spoiled", [0, 2])
def test_a_nan_spoils_no_later_step(grade: Grade, spoiled: int) -> None:
    for rank, found in enumerate(grade.run(b.spoil_a_step, 2, Plan(MIXED), spoiled).results):
        mean = found["with"].pop(spoiled)
        here = f"rank {rank} of 2, step {spoiled} with a NaN in each matrix of rank 0"
        check(
            not all(map(math.isfinite, mean)),
            f"{here}: its mean should not be finite, so that all ranks notice; it is.",
        )
        check(
            found["with"] == found["without"],
            f"{here}: training skips it, and the steps after it should give the same bits as "
            "without it; they give others. A Q that is not finite makes all later means so, and "
            "with another Q they differ: keep that of the step before.",
        )


@task("4.12")
def test_the_first_q_depends_on_seed_and_name(grade: Grade) -> None:
    for rank, found in enumerate(grade.run(b.begin, 2).results):
        here, one = f"rank {rank} of 2", found["by default"]
        for how in ("again", "seed 0"):
            check(
                found[how] == one,
                f"{here}: two first steps with the seed 0, which is the default, and the same name "
                "should give the same bits, and differ. Draw Q from a generator of your own, with "
                "a seed made of both.",
            )
        check(
            found["anew"] == one,
            f"{here}: after load_state_dict with the state of a new PowerSGD, the next step should "
            "be a first one, with the same bits; it is another. What is loaded takes the place of "
            "what was there.",
        )
        for how, cause in (("seed 7", "other seed"), ("another name", "other name")):
            check(
                found[how] != one,
                f"{here}: with an{cause}, the first Q should be another one; the first step gives "
                "the same mean.",
            )
        check(
            found["is_left_alone"],
            f"{here}: after the first steps, torch's own generator is in another state, so that "
            "dropout and shuffling differ from those of a run without compression. Draw Q with "
            "generator=torch.Generator().manual_seed(…).",
        )


@task("4.12")
def test_a_loaded_state_goes_on_bit_for_bit(grade: Grade) -> None:
    run = grade.run(b.go_on, 3, Plan(MIXED, steps=5), 2, if_stuck=STUCK)
    for rank, found in enumerate(run.results):
        expected = found.pop("without a stop")
        for how, steps in found.items():
            check(
                steps == expected,
                f"rank {rank} of 3, {how}: steps 2 to 4 should give the same bits as without a "
                "stop, and give others. The state is the Q of each parameter: a copy, because "
                "later steps may write into what they use; and loading makes a copy as well.",
            )


# orthogonalize


@task("4.12")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_columns_become_orthonormal(grade: Grade, dtype: str) -> None:
    most = 1e-5 if dtype == "float32" else 1e-12
    for what, found in grade.call(b.orthogonalize, dtype).items():
        off, lost = found["not_orthonormal"], found["lost"]
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
