"""Judges tasks 2.15 and 2.16: a linear layer split by its outputs, or by its inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.grade import Grade, Run, check, task
from judging.checks import check_refused, of_members
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import sharded_layers as b
from phase2.sharded_layers import COLUMN, ROW, SPLIT_DIMS, Case
from phase2.sharding import own, passed
from phase2.sharding_checks import (
    Calls,
    check_calls,
    check_graph,
    check_is_independent,
    check_others,
    check_parameters,
    check_same,
    sizes_for,
)

STAGES = ("making it", "forward", "backward")


def _cases(grade: Grade, n: int) -> list[Case]:
    """Sizes of which each number of ranks makes odd ones, with bias and without."""
    a, c = grade.random.randint(1, 3), 2 * grade.random.randint(1, 2) + 1
    rows = (grade.random.choice((1, 3, 5)), 7)
    first = Case(a * n, c * n, rows, is_transposed=True)
    return [first, Case(c * n, a * n, (rows[0],), has_bias=False)]


def _check_layer(layer: str, case: Case, by_rank: Sequence[Any], where: str = "") -> None:
    full, n = _full(case), len(by_rank)
    for rank, got in enumerate(by_rank):
        here = f"{layer}, {case}, rank {rank} of {n}{where}"
        place, is_column = (rank, n), layer == COLUMN
        whole = not is_column or case.gathers
        output = full["output"] if whole else own(full["output"], *place, -1)
        cause, known = _cause_of_output(layer), partial(_known_outputs, layer, full, n)
        check_same(here, "the output", output, got["output"], n, cause, known)
        check_graph(here, got["has_graph"])
        dim = None if is_column else -1
        x_grad = None if full["input"] is None else own(full["input"], *place, dim)
        check_same(here, "the gradient of x", x_grad, got["input"], n, _cause_of_x(layer, case))
        causes = {"bias": "Each rank's output is the same: add the whole bias once, to the sum."}
        check_parameters(
            *(here, got["state"], full, place, SPLIT_DIMS[layer]), {} if is_column else causes
        )
        check_is_independent(here, got)
        check_others(here, got["is_alone"])


def _full(case: Case) -> Mapping[str, Any]:
    """What one rank makes of it, with the whole layer."""
    return passed(case.full(), case.x().requires_grad_(case.is_input_trained), case.weights())


def _known_outputs(layer: str, full: Mapping[str, Any], n: int) -> dict[str, Tensor]:
    """What a known mistake makes of the output, by its cause."""
    bias = full["values"].get("bias")
    if layer == COLUMN or bias is None or n == 1:
        return {}
    return {
        f"The bias is in it {n} times: add it once, to the sum.": full["output"] + (n - 1) * bias
    }


def _cause_of_output(layer: str) -> str:
    if layer == COLUMN:
        return "Rank r has the r-th of N equal parts of the output features, in their order."
    return "Sum the partial products over the ranks, and add the bias once, to the sum."


def _cause_of_x(layer: str, case: Case) -> str:
    if layer == COLUMN:
        after = " After a gather, all ranks compute the same, and no sum is needed."
        return (
            "Each rank's outputs add to the gradient of x: it is summed over the ranks once, where "
            f"x enters.{after if case.gathers else ''}"
        )
    return "What follows the sum is the same on all ranks: its gradient is passed on as it is."


def _check_column_calls(run: Run, case: Case) -> None:
    n, rows = len(run.results), torch.Size(case.rows).numel() * case.itemsize
    gather = [("all_gather", rows * case.out_features // n)]
    backward: Calls = [("all_reduce", rows * case.in_features)]
    expected: list[Calls] = [[], gather if case.gathers else [], backward]
    if not case.is_input_trained:
        expected[-1] = []
    check_calls(run, f"{COLUMN}, {case}", STAGES, expected)


@task("2.15", real=True)
def test_a_column_parallel_layer_is_its_part_of_the_full_one(grade: Grade) -> None:
    for n in sizes_for(grade):
        for case in _cases(grade, n):
            run = grade.run(b.linear_case, n, COLUMN, case)
            _check_layer(COLUMN, case, run.results)
            if grade.is_simulated:
                _check_column_calls(run, case)


@task("2.15", real=True)
def test_a_column_parallel_layer_gathers_its_output(grade: Grade) -> None:
    for n in sizes_for(grade)[:3]:
        first, second = _cases(grade, n)
        for case in (_gathering(first), _gathering(second)):
            run = grade.run(b.linear_case, n, COLUMN, case)
            _check_layer(COLUMN, case, run.results)
            if grade.is_simulated:
                _check_column_calls(run, case)


def _gathering(case: Case) -> Case:
    return replace(case, gathers=True)


@task("2.15")
def test_a_column_parallel_layer_is_frozen_as_the_full_one(grade: Grade) -> None:
    for case in _frozen_cases(4, 6):
        run = grade.run(b.linear_case, 2, COLUMN, case)
        _check_layer(COLUMN, case, run.results)
        _check_column_calls(run, case)


def _frozen_cases(in_features: int, out_features: int) -> list[Case]:
    size = in_features, out_features, (3,)
    return [
        Case(*size, frozen="weight"),
        Case(*size, frozen="bias"),
        Case(*size, is_input_trained=False),
    ]


@task("2.15")
def test_a_column_parallel_layer_keeps_the_dtype(grade: Grade) -> None:
    _check_column_calls(*_check_dtype(grade, COLUMN, gathers=True))


def _check_dtype(grade: Grade, layer: str, *, gathers: bool = False) -> tuple[Run, Case]:
    """Check the dtype of the parameters; return the run, whose calls are to be checked."""
    case = Case(4, 6, (3,), dtype="float32", gathers=gathers)
    run = grade.run(b.linear_case, 2, layer, case)
    for rank, got in enumerate(run.results):
        for name, about in got["state"].items():
            check(
                about["dtype"] == "torch.float32",
                f"{layer}, {case}, rank {rank}: {name} should keep the dtype of the full layer, "
                f"torch.float32, but has {about['dtype']}.",
            )
    return run, case


@task("2.15")
def test_a_column_parallel_layer_inside_a_group(grade: Grade) -> None:
    case = Case(4, 9, (5,), gathers=True)
    for one in (case, Case(4, 9, (5,))):
        _check_layer(COLUMN, one, _in_group(grade, COLUMN, one), _where())


def _in_group(grade: Grade, layer: str, case: Case) -> list[Any]:
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.linear_case, layer, case), if_stuck=STUCK_IN_GROUP
    )
    return of_members(run)


def _where() -> str:
    return f" inside the group {list(MEMBERS)}"


@task("2.15")
def test_outputs_that_cannot_be_split_are_refused(grade: Grade) -> None:
    results = grade.run(b.refused_linear, 4, COLUMN, 8, 10).results
    check_refused(results, "Linear(8, 10) on 4 ranks", "10", "4")


@task("2.16", real=True)
def test_a_row_parallel_layer_is_the_full_one(grade: Grade) -> None:
    for n in sizes_for(grade):
        for case in _cases(grade, n):
            run = grade.run(b.linear_case, n, ROW, case)
            _check_layer(ROW, case, run.results)
            if grade.is_simulated:
                _check_row_calls(run, case)


def _check_row_calls(run: Run, case: Case) -> None:
    num_bytes = torch.Size(case.rows).numel() * case.out_features * case.itemsize
    check_calls(run, f"{ROW}, {case}", STAGES, [[], [("all_reduce", num_bytes)], []])


@task("2.16")
def test_a_row_parallel_layer_is_frozen_as_the_full_one(grade: Grade) -> None:
    for case in _frozen_cases(6, 4):
        _check_layer(ROW, case, grade.run(b.linear_case, 2, ROW, case).results)


@task("2.16")
def test_a_row_parallel_layer_keeps_the_dtype(grade: Grade) -> None:
    _check_row_calls(*_check_dtype(grade, ROW))


@task("2.16")
def test_a_row_parallel_layer_inside_a_group(grade: Grade) -> None:
    case = Case(9, 4, (5,))
    _check_layer(ROW, case, _in_group(grade, ROW, case), _where())


@task("2.16")
def test_inputs_that_cannot_be_split_are_refused(grade: Grade) -> None:
    results = grade.run(b.refused_linear, 4, ROW, 10, 8).results
    check_refused(results, "Linear(10, 8) on 4 ranks", "10", "4")
