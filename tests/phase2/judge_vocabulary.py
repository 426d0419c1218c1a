"""Judges the cross-entropy of task 2.18: no rank ever has the logits of the whole vocabulary."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from distlab.grade import Grade, Run, check, task
from judging.checks import of_members
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import vocabulary as b
from phase2.sharding import rank_part
from phase2.sharding_checks import calls_of, check_same, sizes_for
from phase2.vocabulary import LOSS, Scores

CAUSE = (
    "Greatest logit and sum of exponentials are those of all ranks, and the target's logit is on "
    "one rank: the others add 0. A target of -100 has a loss of 0."
)


def _check_losses(case: Scores, by_rank: Sequence[Any], where: str = "") -> None:
    n = len(by_rank)
    logits = case.logits().detach().requires_grad_()
    flat = logits.flatten(0, -2) if case.shape else logits[None]
    losses = cross_entropy(flat, case.targets().flatten(), reduction="none").view(case.shape)
    (losses * case.weights()).sum().backward()
    for rank, got in enumerate(by_rank):
        here = f"{LOSS}, {case}, rank {rank} of {n}{where}"
        check_same(here, "the losses", losses, got["losses"], n, CAUSE)
        check_same(
            *(
                here,
                "the gradient of logits",
                rank_part(logits.grad, rank, n, -1),
                got["logits"],
                n,
            ),  # type: ignore[arg-type]
            "It is softmax over the whole vocabulary, minus 1 at the target, times the gradient of "
            "the loss. Every rank has all that it takes.",
        )
        check(
            not got["changed"],
            f"{here}: logits and targets belong to the caller: do not change them.",
        )


def _check_numbers(run: Run, case: Scores) -> None:
    """Check that three numbers per target travel, in three calls at most, and none backward."""
    numbers = 3 * torch.Size(case.shape).numel()
    most = numbers * getattr(torch, case.dtype).itemsize
    for rank, by_stage in enumerate(calls_of(run)) if len(run.results) > 1 else ():
        here = f"{LOSS}, {case}, rank {rank} of {len(run.results)}"
        check(len(by_stage) == 3, f"{here}: it calls a barrier, which it does not need.")
        _, forward, backward = by_stage
        check(
            {name for name, _ in forward} <= {"all_reduce"}
            and len(forward) <= 3
            and sum(size for _, size in forward) <= most,
            f"{here}: forward needs at most three all-reduces, together of three numbers per "
            f"target, {most:,} bytes; it made {forward}. Logits stay where they are: send what "
            "each rank has computed of them.",
        )
        check(
            not backward,
            f"{here}: backward needs no communication; it made {backward}. The losses are the same "
            "on all ranks, and so are their gradients.",
        )


def _judge_losses(grade: Grade, n: int, case: Scores) -> None:
    run = grade.run(b.loss_case, n, case)
    _check_losses(case, run.results)
    if grade.is_simulated:
        _check_numbers(run, case)


@task("2.18", real=True)
def test_a_cross_entropy_is_split_by_tokens(grade: Grade) -> None:
    for n in sizes_for(grade):
        shape = grade.random.choice(((5,), (3, 7), (1, 5)))
        case = Scores(n * grade.random.randint(2, 4), shape, has_ignored=True)
        _judge_losses(grade, n, case)
    _judge_losses(grade, n, Scores(2 * n, ()))


@task("2.18")
def test_losses_have_the_dtype_of_the_logits(grade: Grade) -> None:
    _judge_losses(grade, 2, Scores(6, (5,), dtype="float32"))


@task("2.18")
def test_large_logits_have_finite_losses(grade: Grade) -> None:
    _judge_losses(grade, 3, Scores(6, (3, 4), scale=2000.0, is_transposed=True))
    _judge_losses(grade, 3, Scores(6, (3, 4), offset=-2000.0))


@task("2.18")
def test_a_cross_entropy_is_split_inside_a_group(grade: Grade) -> None:
    case = Scores(6, (7,), has_ignored=True)
    run = grade.run(*(inside_group, OUTER_WORLD_SIZE, b.loss_case, case), if_stuck=STUCK_IN_GROUP)
    _check_losses(case, of_members(run), f" inside the group {list(MEMBERS)}")
