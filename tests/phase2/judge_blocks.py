"""Judges task 2.17: an MLP and attention with one all-reduce forward and one backward."""

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

import pytest
import torch

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted
from judging.checks import check_refused, of_members
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import sharded_blocks as b
from phase2.sharded_blocks import Case
from phase2.sharding import passed
from phase2.sharding_checks import (
    check_calls,
    check_graph,
    check_others,
    check_parameters,
    check_same,
    sizes_for,
)

NUM_BYTES = torch.float64.itemsize
STAGES = ("the split", "forward", "backward")
CAUSES = {
    "mlp": "Every hidden feature needs all inputs, and is used by itself until it is summed.",
    "attention": "A head needs its own query, key and value whole, and no other head's.",
}
ONCE = (
    "The layers that begin a module read one input: add up their gradients of it on the rank, and "
    "sum the result over the ranks once."
)


def _full(case: Case) -> Mapping[str, Any]:
    """What one rank makes of it."""
    return passed(case.full(), case.x().requires_grad_(case.is_input_trained), case.weights())


def _check_module(case: Case, by_rank: Sequence[Any], where: str = "") -> None:
    full, n = _full(case), len(by_rank)
    for rank, got in enumerate(by_rank):
        here = f"{case}, rank {rank} of {n}{where}"
        check_same(here, "the output", full["output"], got["outputs"][0], n, CAUSES[case.kind])
        check_graph(here, got["has_graph"])
        check_same(here, "the gradient of x", full["input"], got["inputs"][0], n, ONCE)
        check_others(here, got["is_alone"])
        check_parameters(here, got["state"], full, (rank, n))


def _check_calls(run: Run, case: Case) -> None:
    num_bytes = NUM_BYTES * case.batch_size * case.length * case.width
    once = [("all_reduce", num_bytes)]
    check_calls(run, str(case), STAGES, [[], once, once], ONCE)


def _case(grade: Grade, kind: str, n: int, **more: Any) -> Case:
    """Odd sizes; every rank gets one head or more, and n need not divide the width of an MLP."""
    heads = n * grade.random.randint(1, 2)
    batch_size, length = grade.random.choice((1, 3)), grade.random.choice((3, 5))
    width = heads * grade.random.choice((2, 3))
    width_of_mlp = n // gcd(n, 4) * (3 if n % 2 == 0 else 1)  # n divides 4 times as much
    width = width_of_mlp if kind == "mlp" else width
    return Case(kind, width, heads, batch_size, length, **more)


@task("2.17", real=True)
@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_a_module_that_is_split_computes_what_it_did(grade: Grade, kind: str) -> None:
    for n in sizes_for(grade):
        case = _case(grade, kind, n)
        run = grade.run(b.block_case, n, case)
        _check_module(case, run.results)
        if grade.is_simulated:
            _check_calls(run, case)


@task("2.17")
@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_a_module_without_bias_and_with_frozen_weights_is_split(grade: Grade, kind: str) -> None:
    ends = ("up.weight", "down.bias", "key.weight", "key.bias")
    for case in (
        _case(grade, kind, 2, without_bias=True, is_transposed=True),
        _case(grade, kind, 2, frozen=ends),
    ):
        run = grade.run(b.block_case, 2, case)
        _check_module(case, run.results)
        _check_calls(run, case)


@task("2.17")
@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_a_module_that_is_split_takes_an_input_without_gradient(grade: Grade, kind: str) -> None:
    case = _case(grade, kind, 2, is_input_trained=False)
    _check_module(case, grade.run(b.block_case, 2, case).results)


@task("2.17")
@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_a_module_is_split_inside_a_group(grade: Grade, kind: str) -> None:
    case = _case(grade, kind, len(MEMBERS))
    run = grade.run(*(inside_group, OUTER_WORLD_SIZE, b.block_case, case), if_stuck=STUCK_IN_GROUP)
    _check_module(case, of_members(run), f" inside the group {list(MEMBERS)}")


@task("2.17")
def test_modules_that_cannot_be_split_are_refused(grade: Grade) -> None:
    for case, names in (
        (Case("attention", 12, 3, 1, 2), ("3", "2")),  # 6 rows a rank: one head and a half
        (Case("attention", 8, 1, 1, 2), ("1", "2")),
        (Case("mlp", 3, 1, 1, 2), ("12", "8")),
    ):
        n = int(names[1])
        results = grade.run(b.refused_block, n, case).results
        what = f"{case} on {counted(n, 'rank')}"
        check_refused(results, what, *names)
        for rank, found in enumerate(results):
            check(
                found["is_kept"],
                f"{what}: on rank {rank} a layer has been replaced before the error. Check first.",
            )
