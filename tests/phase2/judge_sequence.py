"""Judges task 2.19: positions split where the weights are not, for the bytes of the all-reduces."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from distlab.grade import Grade, Run, check, task
from judging.checks import check_refused, of_members
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import regions as r
from phase2 import sharded_blocks as b
from phase2.sharded_blocks import Case
from phase2.sharding import own, passed
from phase2.sharding_checks import (
    REAL_SIZES,
    Calls,
    calls_of,
    check_calls,
    check_dtype,
    check_graph,
    check_others,
    check_parameters,
    check_same,
)

GATHER, SCATTER = "gather_from_sequence_region", "reduce_scatter_to_sequence_region"
NUM_BYTES = torch.float64.itemsize
WHERE = f" inside the group {list(MEMBERS)}"
ON_POSITIONS = (
    "Each rank has this gradient for its own positions: it is summed over the ranks once, in every "
    "backward pass."
)
CAUSES = dict.fromkeys(
    (
        *(f"{norm}.{name}" for norm in b.NORMS for name in ("weight", "bias")),
        "attention.out.bias",
        "mlp.down.bias",
    ),
    ON_POSITIONS,
)


def _shapes(function: str, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of what goes in, and of what comes out."""
    part, whole = (3, 2, 2, 3), (3, 2 * n, 2, 3)
    return (part, whole) if function == GATHER else (whole, part)


def _check_regions(function: str, by_rank: Sequence[Any], where: str = "") -> None:
    n = len(by_rank)
    for rank, of_rank in enumerate(by_rank):
        kinds = r.kinds_for(r.SEQUENCE_KINDS, n)
        for place, (kind, found) in enumerate(zip(kinds, of_rank, strict=True)):
            here = f"{function}, rank {rank} of {n}{where}, {kind}"
            xs = [torch.tensor(other[place]["x"]) for other in by_rank]
            gradients = [torch.tensor(other[place]["gradient"]) for other in by_rank]
            output, x_grad = _expected(function, xs, gradients, rank)
            check_same(here, "the output", output, found["y"], n, _CAUSE)
            check_graph(here, found["has_graph"] or kind == r.UNTRAINED)
            wanted = None if kind == r.UNTRAINED else x_grad
            check_same(here, "the gradient of x", wanted, found["x_grad"], n, _CAUSE)
            check_dtype(here, found)
            check_others(here, found["is_alone"])
            check(
                found["x"] == found["x_after"] and found["gradient"] == found["after"],
                f"{here}: x or the gradient that arrives has changed. Another operation may hold "
                "the same tensor: write into memory of your own.",
            )


_CAUSE = (
    "One direction joins the ranks' positions in the order of the ranks; the other sums over the "
    "ranks, and keeps this rank's positions."
)


def _expected(
    function: str, xs: list[Tensor], gradients: list[Tensor], rank: int
) -> tuple[Tensor, Tensor]:
    joined, summed = (xs, gradients) if function == GATHER else (gradients, xs)
    results = torch.cat(joined, 1), own(sum(summed, torch.zeros(())), rank, len(xs), 1)
    return results if function == GATHER else (results[1], results[0])


@task("2.19", real=True)
@pytest.mark.parametrize("function", [GATHER, SCATTER])
def test_a_region_joins_positions_one_way_and_sums_the_other(grade: Grade, function: str) -> None:
    for n in (2, 3, 8, 1) if grade.is_simulated else REAL_SIZES:
        kinds = r.kinds_for(r.SEQUENCE_KINDS, n)
        run = grade.run(r.through_region, n, function, kinds, _shapes(function, n))
        _check_regions(function, run.results)
        if grade.is_simulated:
            check_calls(
                *(run, f"{function} of {len(kinds)} tensors", ("forward", "backward")),
                _expected_calls(function, kinds, n),
                "Send what each rank keeps, and no more: an all-reduce sends twice the bytes of a "
                "reduce-scatter.",
            )


def _expected_calls(function: str, kinds: Sequence[str], n: int) -> list[Calls]:
    """One forward, and where a gradient is needed the other backward."""
    calls: list[Calls] = []
    names = ("all_gather", "reduce_scatter")
    for name in names if function == GATHER else names[::-1]:
        parts = [r.tensors_of(kind, 0, 0, _shapes(GATHER, n)[0]).nbytes for kind in kinds]
        times = n if name == "reduce_scatter" else 1
        calls.append([(name, times * num_bytes) for num_bytes in parts])
        kinds = [kind for kind in kinds if kind != r.UNTRAINED]
    return calls


@task("2.19")
def test_positions_that_cannot_be_split_are_refused(grade: Grade) -> None:
    run = grade.run(
        *(r.refused_positions, 4, 10),
        if_stuck="10 positions cannot be split evenly over 4 ranks: raise a ValueError before "
        "anything is sent. ",
    )
    check_refused(run.results, f"{SCATTER} of 10 positions on 4 ranks", "10", "4")


@task("2.19")
@pytest.mark.parametrize("function", [GATHER, SCATTER])
def test_sequence_regions_inside_a_group(grade: Grade, function: str) -> None:
    shapes = _shapes(function, len(MEMBERS))
    kinds = r.kinds_for(r.SEQUENCE_KINDS, len(MEMBERS))
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, r.through_region, function, kinds, shapes),
        if_stuck=STUCK_IN_GROUP,
    )
    _check_regions(function, of_members(run), WHERE)


def _full(case: Case, change: Callable[[Any], None] | None = None) -> Mapping[str, Any]:
    """What one rank makes of all passes, whose gradients add up."""
    model = case.full()
    if change:
        change(model)
    passes = [
        passed(model, case.x(step).requires_grad_(), case.weights(step))
        for step in range(case.num_passes)
    ]
    return {**passes[-1], "passes": passes}


def _known(case: Case, step: int, name: str, place: tuple[int, int]) -> dict[str, Tensor]:
    """What known mistakes make of a rank's part of the output or of x's gradient, by the cause."""
    _, n = place

    def add_biases_before_the_sum(model: Any) -> None:
        for layer in (model.attention.out, model.mlp.down):
            if layer.bias is not None:
                layer.bias.detach().mul_(n)

    def sum_gradients_twice(model: Any) -> None:
        for name in b.NORMS:
            getattr(model, name).register_forward_hook(multiply_gradient)

    def multiply_gradient(_: Any, __: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: n * gradient)

    changes = {_BIAS_OF_ALL: add_biases_before_the_sum, _SUMMED_TWICE: sum_gradients_twice}
    made = {cause: _full(case, change)["passes"][step] for cause, change in changes.items()}
    return {cause: own(one[name], *place, 1) for cause, one in made.items()} if n > 1 else {}


_BIAS_OF_ALL = (
    "The biases of attention.out and mlp.down are in it once for each rank: add them after the "
    "reduce-scatter, to the sum."
)
_SUMMED_TWICE = (
    "The gradient of what was gathered is summed twice: by the column-parallel layers, and by the "
    "reduce-scatter that is the backward of the gather. The layers after a gather leave their sum "
    "to it."
)


def _check_block(case: Case, by_rank: Sequence[Any], where: str = "") -> None:
    full, n = _full(case), len(by_rank)
    for rank, got in enumerate(by_rank):
        here = f"{case}, rank {rank} of {n}{where}"
        part = [case.batch_size, case.length // n, case.width]
        check(
            got["norms"] == [part] * (2 * case.num_passes),
            f"{here}: each norm should see this rank's positions only, {part}, once in a pass; "
            f"the norms were called with {got['norms']}.",
        )
        for step, expected in enumerate(full["passes"]):
            for what, name, values in (
                ("the output", "output", got["outputs"][step]),
                ("the gradient of x", "input", got["inputs"][step]),
            ):
                check_graph(here, got["has_graph"] or name == "output")
                wanted = own(expected[name], rank, n, 1)
                known = partial(_known, case, step, name, (rank, n))
                check_same(here, what, wanted, values, n, _CAUSE_OF_BLOCK, known)
        check_others(here, got["is_alone"])
        check_parameters(here, got["state"], full, (rank, n), causes=CAUSES)


_CAUSE_OF_BLOCK = (
    "Positions are gathered once before attention and once before the MLP, and the partial results "
    "of each are summed and scattered."
)


def _check_bytes(run: Run, case: Case) -> None:
    """Gathers and scatters each way; what is summed besides is small."""
    n, num_bytes = len(run.results), NUM_BYTES * case.batch_size * case.length * case.width
    small = 6 * NUM_BYTES * case.width
    moved = sorted(2 * [("all_gather", num_bytes // n), ("reduce_scatter", num_bytes)])
    for rank, by_stage in enumerate(calls_of(run)) if n > 1 else ():
        here = f"{case}, rank {rank} of {n}"
        check(len(by_stage) == 3, f"{here}: it calls a barrier, which it does not need.")
        made, forward, backward = by_stage
        check(not made, f"{here}: splitting a block needs no communication; it made {made}.")
        sums = sum(size for name, size in backward if name == "all_reduce")
        others = [call for call in backward if call[0] != "all_reduce"]
        for stage, calls in (("forward", forward), ("backward", others)):
            check(
                sorted(calls) == moved,
                f"{here}: {stage} needs two all-gathers of {num_bytes // n:,} bytes and two "
                f"reduce-scatters of {num_bytes:,}; it made {calls}.",
            )
        check(
            sums <= small,
            f"{here}: backward sums the gradients of 6E = {6 * case.width} numbers, {small:,} "
            f"bytes; it all-reduced {sums:,} bytes.",
        )


def _case(grade: Grade, n: int, **more: Any) -> Case:
    # each rank returns all its weights: few of them on many ranks
    heads, head_width = (n * grade.random.randint(1, 2), 3) if n <= 3 else (n, 1)
    length = n * grade.random.randint(1, 2)
    return Case("block", head_width * heads, heads, grade.random.choice((1, 3)), length, **more)


@task("2.19", real=True)
def test_a_block_on_split_positions_computes_what_it_did(grade: Grade) -> None:
    for n in (2, 3, 5, 1) if grade.is_simulated else REAL_SIZES:
        case = _case(grade, n)
        run = grade.run(b.block_case, n, case)
        _check_block(case, run.results)
        if grade.is_simulated:
            _check_bytes(run, case)


@task("2.19")
def test_blocks_without_bias_frozen_and_passed_twice(grade: Grade) -> None:
    frozen = ("mlp_norm.weight", "attention_norm.bias", "down.bias", "query.weight")
    for case in (
        _case(grade, 2, without_bias=True),
        _case(grade, 3, frozen=frozen, is_transposed=True),
        _case(grade, 2, num_passes=2),
    ):
        n = 3 if case.frozen else 2
        _check_block(case, grade.run(b.block_case, n, case).results)


@task("2.19")
def test_a_block_is_split_inside_a_group(grade: Grade) -> None:
    case = _case(grade, len(MEMBERS))
    run = grade.run(*(inside_group, OUTER_WORLD_SIZE, b.block_case, case), if_stuck=STUCK_IN_GROUP)
    _check_block(case, of_members(run), WHERE)


@task("2.19")
def test_a_block_whose_heads_cannot_be_split_is_refused(grade: Grade) -> None:
    case = Case("block", 12, 3, 1, 2)
    results = grade.run(b.refused_block, 2, case).results
    check_refused(results, f"{case} on 2 ranks", "3", "2")
    for rank, found in enumerate(results):
        check(
            found["is_kept"],
            f"{case} on 2 ranks: on rank {rank} a layer has been replaced before the error. Check "
            "first.",
        )
