"""Judges tasks 2.15 to 2.19: what is split over the ranks computes what one rank computed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted
from judging.checks import check_refused, of_members
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import split as b
from phase2.sharding import rank_part
from phase2.sharding_checks import (
    Calls,
    check_calls,
    check_graph,
    check_is_independent,
    check_same,
    check_state,
    check_use,
    sizes_for,
)
from phase2.split import (
    ATTENTION_SPLIT,
    BLOCK_SPLIT,
    COLUMN,
    EMBEDDING,
    LAYERS,
    MLP_SPLIT,
    NORMS,
    ROW,
    Case,
)

WHERE = f" inside the group {list(MEMBERS)}"
ONCE = (
    "The layers that begin a module read one input: add up their gradients of it on the rank, and "
    "sum the result over the ranks once."
)
ON_POSITIONS = (
    "Each rank has this gradient for its own positions: it is summed over the ranks once, in every "
    "backward pass."
)
OF_BLOCK = (
    "Positions are gathered once before attention and once before the MLP, and the partial results "
    "of each are summed and scattered."
)
BIAS_OF_ALL = (
    "The biases of attention.out and mlp.down are in it once for each rank: add them after the "
    "reduce-scatter, to the sum."
)
SUMMED_TWICE = (
    "The gradient of what was gathered is summed twice: by the column-parallel layers, and by the "
    "reduce-scatter that is the backward of the gather. The layers after a gather leave their sum "
    "to it."
)


class Causes(NamedTuple):
    """The likely causes of what is wrong."""

    output: str
    x: str
    gradients: Mapping[str, str] = {}  # parameter: cause


CAUSES = {
    COLUMN: Causes(
        "Rank r has the r-th of N equal parts of the output features, in their order.",
        "Each rank's outputs add to the gradient of x: it is summed over the ranks once, where x "
        "enters. After a gather, all ranks compute the same, and no sum is needed.",
    ),
    ROW: Causes(
        "Sum the partial products over the ranks, and add the bias once, to the sum.",
        "What follows the sum is the same on all ranks: its gradient is passed on as it is.",
        {"bias": "Each rank's output is the same: add the whole bias once, to the sum."},
    ),
    EMBEDDING: Causes("A token's row is on one rank; each of the others adds zeros for it.", ""),
    MLP_SPLIT: Causes(
        "Every hidden feature needs all inputs, and is used by itself until it is summed.", ONCE
    ),
    ATTENTION_SPLIT: Causes(
        "A head needs its own query, key and value whole, and no other head's.", ONCE
    ),
    BLOCK_SPLIT: Causes(
        OF_BLOCK,
        OF_BLOCK,
        dict.fromkeys(
            (
                *(f"{norm}.{name}" for norm in NORMS for name in ("weight", "bias")),
                "attention.out.bias",
                "mlp.down.bias",
            ),
            ON_POSITIONS,
        ),
    ),
}


def _judge(grade: Grade, n: int, *cases: Case) -> None:
    """Judge a split on n ranks: what it computes, what it leaves, and what it sends."""
    for case in cases:
        run = grade.run(b.split_case, n, case)
        _check_split(case, run.results)
        if grade.is_simulated:
            _check_calls(run, case)


def _judge_in_group(grade: Grade, *cases: Case) -> None:
    for case in cases:
        run = grade.run(
            *(inside_group, OUTER_WORLD_SIZE, b.split_case, case), if_stuck=STUCK_IN_GROUP
        )
        _check_split(case, of_members(run), WHERE)


def _judge_refusal(grade: Grade, n: int, case: Case, *names: str) -> None:
    results, what = grade.run(b.refused_split, n, case).results, f"{case} on {counted(n, 'rank')}"
    check_refused(results, what, *names, str(n))
    for rank, found in enumerate(results):
        check(
            found["is_kept"],
            f"{what}: on rank {rank} a layer has been replaced before the error. Check first.",
        )


# What one rank makes of it


class Whole(NamedTuple):
    """What the full module makes of a case."""

    module: nn.Module
    outputs: list[Tensor]
    inputs: list[Tensor | None]  # their gradients


def _whole(case: Case, change: Callable[[Any], None] = lambda module: None) -> Whole:
    whole = Whole(case.full(), [], [])
    change(whole.module)
    for step in range(case.num_passes):
        x = case.x(step)
        x.requires_grad_(case.is_input_trained and x.is_floating_point())
        output = whole.module(x)
        if output.requires_grad:
            (output * case.weights(step)).sum().backward()
        whole.outputs.append(output.detach())
        whole.inputs.append(x.grad)
    return whole


def _mistakes(case: Case, n: int) -> Mapping[str, Callable[[Any], None]]:
    """Known mistakes as changes of the full module, by the cause to name."""
    if n == 1 or case.function not in (ROW, BLOCK_SPLIT):
        return {}

    def multiply_biases(module: Any) -> None:
        layers = (module,) if case.function == ROW else (module.attention.out, module.mlp.down)
        for layer in layers:
            if layer.bias is not None:
                layer.bias.detach().mul_(n)

    def sum_gradients_twice(block: Any) -> None:
        for name in NORMS:
            getattr(block, name).register_forward_hook(multiply_gradient)

    def multiply_gradient(_: Any, __: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: n * gradient)

    if case.function == ROW:
        return {f"The bias is in it {n} times: add it once, to the sum.": multiply_biases}
    return {BIAS_OF_ALL: multiply_biases, SUMMED_TWICE: sum_gradients_twice}


def _known(
    case: Case, step: int, place: tuple[int, int], dim: int | None, what: str
) -> Mapping[str, Tensor]:
    """What known mistakes make of a rank's part of the outputs or of the gradients of inputs."""
    found = {}
    for cause, change in _mistakes(case, place[1]).items():
        tensor = getattr(_whole(case, change), what)[step]
        if tensor is not None:
            found[cause] = rank_part(tensor, *place, dim)
    return found


def _check_split(case: Case, by_rank: Sequence[Any], where: str = "") -> None:
    whole, causes, n = _whole(case), CAUSES[case.function], len(by_rank)
    for rank, got in enumerate(by_rank):
        here, place = f"{case}, rank {rank} of {n}{where}", (rank, n)
        if case.function == BLOCK_SPLIT:
            _check_norms(here, got["norms"], case, n)
        for step, found in enumerate(got["passes"]):
            _check_pass(here, case, step, found, whole, place)
        part_of = case.kind.part_of
        check_state(here, got["state"], whole.module, part_of, place, causes.gradients)
        if case.function in LAYERS:
            check_is_independent(here, got)


def _check_pass(
    here: str, case: Case, step: int, found: Any, whole: Whole, place: tuple[int, int]
) -> None:
    causes, n, full = CAUSES[case.function], place[1], whole.outputs[step]
    wanted = rank_part(full, *place, case.y_dim)
    known = partial(_known, case, step, place)
    check_same(
        *(here, "the output", wanted, found["output"], n, causes.output),
        partial(known, case.y_dim, "outputs"),
    )
    check(
        found["dtype"] == case.dtype,
        f"{here}: the output should have the dtype of the module, {case.dtype}, not "
        f"{found['dtype']}.",
    )
    if case.function == EMBEDDING:
        check(not found["changed"], f"{here}: tokens belong to the caller: do not change them.")
        return
    check_graph(here, found["has_graph"])
    x_grad, dim = whole.inputs[step], case.kind.x_dim
    wanted_x = None if x_grad is None else rank_part(x_grad, *place, dim)
    check_same(
        *(here, "the gradient of x", wanted_x, found["input"], n, causes.x),
        partial(known, dim, "inputs"),
    )
    check_use(here, found)


def _check_norms(here: str, shapes: list[list[int]], case: Case, n: int) -> None:
    batch_size, length = case.rows
    part = [batch_size, length // n, case.sizes[0]]
    check(
        shapes == [part] * (2 * case.num_passes),
        f"{here}: each norm should see this rank's positions only, {part}, once in a pass; "
        f"the norms were called with {shapes}.",
    )


def _check_calls(run: Run, case: Case) -> None:
    n, itemsize = len(run.results), getattr(torch, case.dtype).itemsize
    x, y = case.x().numel() * itemsize, case.weights().numel() * itemsize
    gather, scatter = ("all_gather", x // n), ("reduce_scatter", x)
    by_function: dict[str, tuple[Calls, Calls]] = {
        COLUMN: ([("all_gather", y // n)] if case.gathers else [], [("all_reduce", x)]),
        ROW: ([("all_reduce", y)], []),
        EMBEDDING: ([("all_reduce", y)], []),
        MLP_SPLIT: ([("all_reduce", x)], [("all_reduce", x)]),
        ATTENTION_SPLIT: ([("all_reduce", x)], [("all_reduce", x)]),
        BLOCK_SPLIT: (2 * [gather, scatter], 2 * [gather, scatter]),
    }
    forward, backward = by_function[case.function]
    if not case.is_input_trained:
        backward = []
    expected: dict[str, Calls] = {"the split": []}
    for step in range(case.num_passes):
        after = f" of pass {step}" * bool(step)
        expected |= {f"forward{after}": forward, f"backward{after}": backward}
    small = 6 * itemsize * case.sizes[0] if case.function == BLOCK_SPLIT else 0
    check_calls(run, str(case), expected, CAUSES[case.function].x, small)


# 2.15 and 2.16: linear layers


def _linear_cases(grade: Grade, layer: str, n: int) -> list[Case]:
    """Sizes of which each number of ranks makes odd ones, with bias and without."""
    a, c = grade.random.randint(1, 3), 2 * grade.random.randint(1, 2) + 1
    rows = grade.random.choice((1, 3, 5))
    return [
        Case(layer, (a * n, c * n), (rows, 7), is_transposed=True),
        Case(layer, (c * n, a * n), (rows,), has_bias=False, num_passes=2),
        *([Case(layer, (n, n), ())] if n <= 3 else []),  # one feature a rank, one row
    ]


def _frozen_cases(layer: str, sizes: tuple[int, int]) -> list[Case]:
    return [
        Case(layer, sizes, (3,), frozen=("weight",)),
        Case(layer, sizes, (3,), frozen=("bias",)),
        Case(layer, sizes, (3,), is_input_trained=False),
    ]


def _dtype_cases(case: Case) -> list[Case]:
    return [replace(case, dtype=dtype) for dtype in ("float32", "bfloat16")]


@task("2.15", real=True)
def test_a_column_parallel_layer_is_its_part_of_the_full_one(grade: Grade) -> None:
    for n in sizes_for(grade):
        _judge(grade, n, *_linear_cases(grade, COLUMN, n))


@task("2.15", real=True)
def test_a_column_parallel_layer_gathers_its_output(grade: Grade) -> None:
    for n in sizes_for(grade)[:3]:
        _judge(grade, n, *(replace(c, gathers=True) for c in _linear_cases(grade, COLUMN, n)))


@task("2.15")
def test_a_column_parallel_layer_is_frozen_as_the_full_one(grade: Grade) -> None:
    _judge(grade, 2, *_frozen_cases(COLUMN, (4, 6)))


@task("2.15")
def test_a_column_parallel_layer_keeps_the_dtype(grade: Grade) -> None:
    _judge(grade, 2, *_dtype_cases(Case(COLUMN, (4, 6), (3,), gathers=True)))


@task("2.15")
def test_a_column_parallel_layer_inside_a_group(grade: Grade) -> None:
    case = Case(COLUMN, (4, 9), (5,))
    _judge_in_group(grade, replace(case, gathers=True), case)


@task("2.15")
def test_outputs_that_cannot_be_split_are_refused(grade: Grade) -> None:
    _judge_refusal(grade, 4, Case(COLUMN, (8, 10), (1,)), "10")


@task("2.16", real=True)
def test_a_row_parallel_layer_is_the_full_one(grade: Grade) -> None:
    for n in sizes_for(grade):
        _judge(grade, n, *_linear_cases(grade, ROW, n))


@task("2.16")
def test_a_row_parallel_layer_is_frozen_as_the_full_one(grade: Grade) -> None:
    _judge(grade, 2, *_frozen_cases(ROW, (6, 4)))


@task("2.16")
def test_a_row_parallel_layer_keeps_the_dtype(grade: Grade) -> None:
    _judge(grade, 2, *_dtype_cases(Case(ROW, (4, 6), (3,))))


@task("2.16")
def test_a_row_parallel_layer_inside_a_group(grade: Grade) -> None:
    _judge_in_group(grade, Case(ROW, (9, 4), (5,)))


@task("2.16")
def test_inputs_that_cannot_be_split_are_refused(grade: Grade) -> None:
    _judge_refusal(grade, 4, Case(ROW, (10, 8), (1,)), "10")


# 2.17: an MLP and attention

MODULES = pytest.mark.parametrize("function", [MLP_SPLIT, ATTENTION_SPLIT], ids=["mlp", "heads"])


def _module_case(grade: Grade, function: str, n: int, **more: Any) -> Case:
    """Odd sizes; every rank gets one head or more, and n need not divide the width of an MLP."""
    heads = n * grade.random.randint(1, 2)
    width = heads * grade.random.choice((2, 3))
    if function == MLP_SPLIT:
        width = n // gcd(n, 4) * (3 if n % 2 == 0 else 1)  # n divides 4 times as much
    rows = grade.random.choice((1, 3)), grade.random.choice((3, 5))
    return Case(function, (width, heads), rows, **more)


@task("2.17", real=True)
@MODULES
def test_a_module_that_is_split_computes_what_it_did(grade: Grade, function: str) -> None:
    for n in sizes_for(grade):
        _judge(grade, n, _module_case(grade, function, n))


@task("2.17")
@MODULES
def test_a_module_without_bias_and_with_frozen_weights_is_split(
    grade: Grade, function: str
) -> None:
    case = partial(_module_case, grade, function, 2)
    frozen = "up.weight", "down.bias", "key.weight", "key.bias"
    _judge(grade, 2, case(has_bias=False, is_transposed=True), case(frozen=frozen, num_passes=2))
    _judge(grade, 2, case(dtype="bfloat16"))


@task("2.17")
@MODULES
def test_a_module_that_is_split_takes_an_input_without_gradient(
    grade: Grade, function: str
) -> None:
    _judge(grade, 2, _module_case(grade, function, 2, is_input_trained=False))


@task("2.17")
@MODULES
def test_a_module_is_split_inside_a_group(grade: Grade, function: str) -> None:
    _judge_in_group(grade, _module_case(grade, function, len(MEMBERS)))


@task("2.17")
def test_modules_that_cannot_be_split_are_refused(grade: Grade) -> None:
    heads = "3", "1"  # 6 rows a rank would be one head and a half
    for width, num_heads in zip((12, 8), heads, strict=True):
        case = Case(ATTENTION_SPLIT, (width, int(num_heads)), (1, 2))
        _judge_refusal(grade, 2, case, num_heads)
    _judge_refusal(grade, 8, Case(MLP_SPLIT, (3, 1), (1, 2)), "12")


# 2.18: an embedding


@task("2.18", real=True)
def test_an_embedding_is_split_by_tokens(grade: Grade) -> None:
    for n in sizes_for(grade):
        shapes = (5,), (3, 7), (1, 2, 3)
        sizes = n * grade.random.randint(1, 3), grade.random.randint(2, 4)
        _judge(grade, n, Case(EMBEDDING, sizes, grade.random.choice(shapes), num_passes=2))
    _judge(grade, n, Case(EMBEDDING, (2 * n, 3), ()))


@task("2.18")
def test_an_embedding_keeps_the_dtype(grade: Grade) -> None:
    _judge(grade, 2, *_dtype_cases(Case(EMBEDDING, (6, 3), (4,))))


@task("2.18")
def test_a_frozen_embedding_stays_frozen(grade: Grade) -> None:
    _judge(grade, 2, Case(EMBEDDING, (6, 3), (4,), frozen=("weight",)))


@task("2.18")
def test_an_embedding_is_split_inside_a_group(grade: Grade) -> None:
    _judge_in_group(grade, Case(EMBEDDING, (9, 2), (7,)))


@task("2.18")
def test_a_vocabulary_that_cannot_be_split_is_refused(grade: Grade) -> None:
    _judge_refusal(grade, 4, Case(EMBEDDING, (10, 4), (1,)), "10")


# 2.19: a block


def _block_case(grade: Grade, n: int, **more: Any) -> Case:
    # Each rank returns all its weights: few of them on many ranks.
    heads, head_width = (n * grade.random.randint(1, 2), 3) if n <= 3 else (n, 1)
    rows = grade.random.choice((1, 3)), n * grade.random.randint(1, 2)
    return Case(BLOCK_SPLIT, (head_width * heads, heads), rows, **more)


@task("2.19", real=True)
def test_a_block_on_split_positions_computes_what_it_did(grade: Grade) -> None:
    for n in (2, 3, 5, 1) if grade.is_simulated else sizes_for(grade):
        _judge(grade, n, _block_case(grade, n))


@task("2.19")
def test_blocks_without_bias_frozen_and_passed_twice(grade: Grade) -> None:
    frozen = "mlp_norm.weight", "attention_norm.bias", "down.bias", "query.weight"
    _judge(grade, 2, _block_case(grade, 2, has_bias=False))
    _judge(grade, 3, _block_case(grade, 3, frozen=frozen, is_transposed=True))
    _judge(grade, 2, _block_case(grade, 2, num_passes=3), _block_case(grade, 2, dtype="bfloat16"))


@task("2.19")
def test_a_block_is_split_inside_a_group(grade: Grade) -> None:
    _judge_in_group(grade, _block_case(grade, len(MEMBERS)))


@task("2.19")
def test_a_block_whose_heads_cannot_be_split_is_refused(grade: Grade) -> None:
    _judge_refusal(grade, 2, Case(BLOCK_SPLIT, (12, 3), (1, 2)), "3")
