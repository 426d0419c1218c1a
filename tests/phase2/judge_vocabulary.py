"""Judges task 2.18: embedding and cross-entropy without the whole vocabulary on any rank."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from distlab.grade import Grade, Run, check, task
from judging.checks import check_refused, of_members
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import vocabulary as b
from phase2.sharding import own, passed
from phase2.sharding_checks import (
    calls_of,
    check_calls,
    check_is_independent,
    check_parameters,
    check_same,
    sizes_for,
)
from phase2.vocabulary import EMBEDDING, LOSS, Scores, Tokens

STAGES = ("making it", "forward", "backward")
WHERE = f" inside the group {list(MEMBERS)}"


def _tokens(grade: Grade, n: int) -> Tokens:
    shape = grade.random.choice(((5,), (3, 7), (1, 2, 3)))
    return Tokens(n * grade.random.randint(1, 3), grade.random.randint(2, 4), shape)


def _check_embedding(case: Tokens, by_rank: Sequence[Any], where: str = "") -> None:
    full, n = passed_tokens(case), len(by_rank)
    for rank, got in enumerate(by_rank):
        here = f"{EMBEDDING}, {case}, rank {rank} of {n}{where}"
        check_same(
            *(here, "the output", full["output"], got["output"], n),
            "A token's row is on one rank; each of the others adds zeros for it.",
        )
        check_parameters(here, got["state"], full, (rank, n), {"weight": 0})
        check(got["are_tokens_kept"], f"{here}: tokens belong to the caller: do not change them.")
        check_is_independent(here, got)


def passed_tokens(case: Tokens) -> Any:
    """What the full embedding makes of them."""
    if not case.is_frozen:
        return passed(case.full(), case.tokens(), case.weights())
    full = case.full()
    values, gradients = {"weight": full.weight}, {"weight": None}
    return {"output": full(case.tokens()), "values": values, "gradients": gradients}


@task("2.18", real=True)
def test_an_embedding_is_split_by_tokens(grade: Grade) -> None:
    for n in sizes_for(grade):
        case = _tokens(grade, n)
        run = grade.run(b.embedding_case, n, case)
        _check_embedding(case, run.results)
        if grade.is_simulated:
            _check_embedding_calls(run, case)


def _check_embedding_calls(run: Run, case: Tokens) -> None:
    num_bytes = torch.Size(case.shape).numel() * case.width * case.dtype.itemsize
    expected = [[], [("all_reduce", num_bytes)], []]
    check_calls(run, f"{EMBEDDING}, {case}", STAGES, expected)


@task("2.18")
def test_an_embedding_keeps_the_dtype(grade: Grade) -> None:
    case = Tokens(6, 3, (4,), dtype=torch.float32)
    run = grade.run(b.embedding_case, 2, case)
    for rank, got in enumerate(run.results):
        found = got["state"]["weight"]["dtype"]
        check(
            found == str(case.dtype),
            f"{EMBEDDING}, {case}, rank {rank}: the weight should keep the dtype of the full "
            f"embedding, {case.dtype}, but has {found}.",
        )
    _check_embedding_calls(run, case)


@task("2.18")
def test_a_frozen_embedding_stays_frozen(grade: Grade) -> None:
    case = Tokens(6, 3, (4,), is_frozen=True)
    _check_embedding(case, grade.run(b.embedding_case, 2, case).results)


@task("2.18")
def test_a_vocabulary_that_cannot_be_split_is_refused(grade: Grade) -> None:
    results = grade.run(b.refused_embedding, 4, 10).results
    check_refused(results, "Embedding(10, 4) on 4 ranks", "10", "4")


def _check_losses(case: Scores, by_rank: Sequence[Any], where: str = "") -> None:
    n = len(by_rank)
    logits = case.logits().detach().requires_grad_()
    losses = cross_entropy(logits.flatten(0, -2), case.targets().flatten(), reduction="none").view(
        case.shape
    )
    (losses * case.weights()).sum().backward()
    gradient = logits.grad
    for rank, got in enumerate(by_rank):
        here = f"{LOSS}, {case}, rank {rank} of {n}{where}"
        check_same(here, "the losses", losses, got["losses"], n, _CAUSE)
        wanted = None if gradient is None else own(gradient, rank, n, -1)
        check_same(
            *(here, "the gradient of logits", wanted, got["logits"], n),
            "It is softmax over the whole vocabulary, minus 1 at the target, times the gradient of "
            "the loss. Every rank has all that it takes.",
        )
        check(
            got["are_inputs_kept"],
            f"{here}: logits and targets belong to the caller: do not change them.",
        )


_CAUSE = (
    "Greatest logit and sum of exponentials are those of all ranks, and the target's logit is on "
    "one rank: the others add 0. A target of -100 has a loss of 0."
)


def _check_numbers(run: Run, case: Scores) -> None:
    """Three numbers per target, in three calls at most, and nothing backward."""
    most = 3 * case.dtype.itemsize * torch.Size(case.shape).numel()
    for rank, by_stage in enumerate(calls_of(run)) if len(run.results) > 1 else ():
        here = f"{LOSS}, {case}, rank {rank} of {len(run.results)}"
        check(len(by_stage) == 3, f"{here}: it calls a barrier, which it does not need.")
        _, forward, backward = by_stage
        num_bytes = sum(size for _, size in forward)
        check(
            {name for name, _ in forward} <= {"all_reduce"}
            and len(forward) <= 3
            and num_bytes <= most,
            f"{here}: forward needs at most three all-reduces, together of three numbers per "
            f"target, {most:,} bytes; it made {forward}. Logits stay where they are: send what "
            "each rank has computed of them.",
        )
        check(
            not backward,
            f"{here}: backward needs no communication; it made {backward}. The losses are the same "
            "on all ranks, and so are their gradients.",
        )


@task("2.18", real=True)
def test_a_cross_entropy_is_split_by_tokens(grade: Grade) -> None:
    for n in sizes_for(grade):
        shape = grade.random.choice(((5,), (3, 7), (1, 5)))
        case = Scores(n * grade.random.randint(2, 4), shape, has_ignored=True)
        run = grade.run(b.loss_case, n, case)
        _check_losses(case, run.results)
        if grade.is_simulated:
            _check_numbers(run, case)


@task("2.18")
def test_losses_have_the_dtype_of_the_logits(grade: Grade) -> None:
    case = Scores(6, (5,), dtype=torch.float32)
    _check_numbers(grade.run(b.loss_case, 2, case), case)


@task("2.18")
def test_large_logits_have_finite_losses(grade: Grade) -> None:
    case = Scores(6, (3, 4), scale=2000.0, is_transposed=True)
    _check_losses(case, grade.run(b.loss_case, 3, case).results)


@task("2.18")
def test_a_vocabulary_is_split_inside_a_group(grade: Grade) -> None:
    tokens, scores = Tokens(9, 2, (7,)), Scores(6, (7,), has_ignored=True)
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.embedding_case, tokens), if_stuck=STUCK_IN_GROUP
    )
    _check_embedding(tokens, of_members(run), WHERE)
    run = grade.run(*(inside_group, OUTER_WORLD_SIZE, b.loss_case, scores), if_stuck=STUCK_IN_GROUP)
    _check_losses(scores, of_members(run), WHERE)
