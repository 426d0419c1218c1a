"""Judges tasks 2.13 to 2.17: modules split over ranks give the results of the full modules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distlab.grade import Grade, Run, check, check_cost, task
from distlab.util.text import counted
from judging.checks import check_refused
from judging.expect import expect, results_in_group
from judging.groups import MEMBERS
from phase2 import sharding_checks as c
from phase2 import tensor_parallel as b

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
    "of each are summed and scattered. The biases of attention.out and mlp.down are added once, "
    "after the reduce-scatter. The layers after a gather leave the sum of gradients to its "
    "backward pass."
)


class Causes(NamedTuple):
    """Likely causes of a wrong output, a wrong gradient of x, and wrong gradients of parameters."""

    output: str
    x: str
    gradients: Mapping[str, str] = {}  # parameter -> cause


CAUSES = {
    b.COLUMN: Causes(
        "Rank r has the r-th of N equal parts of the output features, in their order.",
        "Each rank's outputs add to the gradient of x: it is summed over the ranks once, where x "
        "enters. After a gather, all ranks compute the same, and no sum is needed.",
    ),
    b.ROW: Causes(
        "Sum the partial products over the ranks, and add the bias once, to the sum.",
        "What follows the sum is the same on all ranks: its gradient is passed on as it is.",
        {"bias": "Each rank's output is the same: add the whole bias once, to the sum."},
    ),
    b.EMBEDDING: Causes("A token's row is on one rank; each of the others adds zeros for it.", ""),
    b.MLP_SPLIT: Causes(
        "Every hidden feature needs all inputs, and is used by itself until it is summed.", ONCE
    ),
    b.ATTENTION_SPLIT: Causes(
        "A head needs its own query, key and value whole, and no other head's.", ONCE
    ),
    b.BLOCK_SPLIT: Causes(
        OF_BLOCK,
        OF_BLOCK,
        dict.fromkeys(
            (
                *(f"{norm}.{name}" for norm in b.NORMS for name in ("weight", "bias")),
                "attention.out.bias",
                "mlp.down.bias",
            ),
            ON_POSITIONS,
        ),
    ),
}


def _judge(grade: Grade, n: int, *cases: b.Case) -> None:
    """Judge split modules on n ranks: results, side effects and messages."""
    run = grade.run(b.split_cases, n, cases)
    for case, by_rank in zip(cases, zip(*run.results, strict=True), strict=True):
        _check_split(case, by_rank)
    if grade.is_simulated and n > 1:
        _check_calls(c.calls_of(run), cases)


def _judge_refusal(grade: Grade, n: int, case: b.Case, *names: str) -> None:
    results, what = grade.run(b.refused_split, n, case).results, f"{case} on {counted(n, 'rank')}"
    check_refused(results, what, *names, str(n), text="same")
    for rank, found in enumerate(results):
        check(
            found["is_kept"],
            f"{what}: on rank {rank} a layer has been replaced before the error. Check first.",
        )


class Whole(NamedTuple):
    """A case's full module after its passes, with their outputs and input gradients."""

    module: nn.Module
    outputs: list[Tensor]
    inputs: list[Tensor | None]


def _whole(case: b.Case) -> Whole:
    whole = Whole(case.full(), [], [])
    for step in range(case.num_passes):
        x = case.x(step)
        x.requires_grad_(case.is_input_trained and x.is_floating_point())
        output = whole.module(x)
        if output.requires_grad:
            (output * case.weights(step)).sum().backward()
        whole.outputs.append(output.detach())
        whole.inputs.append(x.grad)
    return whole


def _check_split(case: b.Case, by_rank: Sequence[Any], where: str = "") -> None:
    whole, causes, n = _whole(case), CAUSES[case.function], len(by_rank)
    for rank, got in enumerate(by_rank):
        here, place = f"{case}, rank {rank} of {n}{where}", (rank, n)
        if case.function == b.BLOCK_SPLIT:
            rows, length = case.rows
            what = "the shapes that the norms see, this rank's positions only,"
            part = [rows, length // n, case.sizes[0]]
            expect(f"{here}: {what}", got["norms"], [part] * (2 * case.num_passes))
        for step, found in enumerate(got["passes"]):
            _check_pass(here, case, found, whole.outputs[step], whole.inputs[step], place)
        part_of = case.kind.part_of
        c.check_state(here, got["state"], whole.module, part_of, place, causes.gradients)
        if case.function in b.LAYERS:
            c.check_is_independent(here, got)


def _check_pass(
    here: str, case: b.Case, found: Any, y: Tensor, x_grad: Tensor | None, place: tuple[int, int]
) -> None:
    causes, n = CAUSES[case.function], place[1]
    wanted = b.rank_part(y, *place, case.y_dim)
    c.check_same(here, "the output", wanted, found["output"], n, causes.output)
    expect(f"{here}: the dtype of the output", found["dtype"], case.dtype)
    if case.function == b.EMBEDDING:
        check(not found["changed"], f"{here}: tokens belong to the caller: do not change them.")
        return
    c.check_graph(here, found["has_graph"])
    part = None if x_grad is None else b.rank_part(x_grad, *place, case.kind.x_dim)
    c.check_same(here, "the gradient of x", part, found["input"], n, causes.x)
    c.check_use(here, found)


def _check_calls(by_rank: Sequence[Sequence[c.Calls]], cases: Sequence[b.Case]) -> None:
    lengths = [1 + 2 * case.num_passes for case in cases]  # stages: 1 for the split, 2 per pass
    for rank, stages in enumerate(by_rank):
        c.check_barriers(f"{cases[0].function}, rank {rank}", len(stages), 1 + sum(lengths))
    for case, length, end in zip(cases, lengths, accumulate(lengths), strict=True):
        stages_of_case = slice(1 + end - length, 1 + end)
        _check_calls_of([stages[stages_of_case] for stages in by_rank], case)


def _check_calls_of(by_rank: Sequence[Sequence[c.Calls]], case: b.Case) -> None:
    n, itemsize = len(by_rank), getattr(torch, case.dtype).itemsize
    x, y = case.x().numel() * itemsize, case.weights().numel() * itemsize
    gather, scatter = ("all_gather", x // n), ("reduce_scatter", x)
    by_function: dict[str, tuple[c.Calls, c.Calls]] = {
        b.COLUMN: ([("all_gather", y // n)] if case.gathers else [], [("all_reduce", x)]),
        b.ROW: ([("all_reduce", y)], []),
        b.EMBEDDING: ([("all_reduce", y)], []),
        b.MLP_SPLIT: ([("all_reduce", x)], [("all_reduce", x)]),
        b.ATTENTION_SPLIT: ([("all_reduce", x)], [("all_reduce", x)]),
        b.BLOCK_SPLIT: (2 * [gather, scatter], 2 * [gather, scatter]),
    }
    forward, backward = by_function[case.function]
    if not case.is_input_trained:
        backward = []
    expected: dict[str, c.Calls] = {"the split": []}
    for step in range(case.num_passes):
        after = f" of pass {step}" * bool(step)
        expected |= {f"forward{after}": forward, f"backward{after}": backward}
    small = 6 * itemsize * case.sizes[0] if case.function == b.BLOCK_SPLIT else 0
    c.check_calls(by_rank, str(case), expected, CAUSES[case.function].x, small)


Drawn = Callable[[Grade, int], list[b.Case]]  # draws cases for a number of ranks


@dataclass(frozen=True)
class Contract:
    """A task's promises about a split module, as test cases.

    Attributes:
        task: The number of the task.
        name: The beginning of each test's name, after ``test_``.
        of_sizes: Draws cases for any number of ranks.
        variants: Draws cases with frozen parameters, other dtypes and the like.
        refused: For each refusal, the number of ranks, a case that cannot be split over them, and
            a number that the error should name.
    """

    task: str
    name: str
    of_sizes: Drawn
    variants: Drawn
    refused: Sequence[tuple[int, b.Case, str]]

    def tests(self) -> dict[str, Callable[[Grade], None]]:
        """Return the tests by name, marked as tests of the task."""
        tests = {
            "computes_what_the_full_one_does": self._test_sizes,
            "keeps_dtypes_and_what_is_frozen": self._test_variants,
            "inside_a_group": self._test_group,
            "refuses_what_cannot_be_split": self._test_refusals,
        }
        return {
            f"test_{self.name}_{promise}": task(self.task, real=test == self._test_sizes)(
                _plain(test)
            )
            for promise, test in tests.items()
        }

    def _test_sizes(self, grade: Grade) -> None:
        for n in c.sizes_for(grade):
            _judge(grade, n, *self.of_sizes(grade, n))

    def _test_variants(self, grade: Grade) -> None:
        _judge(grade, 2, *self.variants(grade, 2))

    def _test_group(self, grade: Grade) -> None:
        cases = self.of_sizes(grade, len(MEMBERS))
        cases = [*cases, replace(cases[0], frozen=("weight",))]
        results = results_in_group(grade, b.split_cases, cases)
        for case, by_rank in zip(cases, zip(*results, strict=True), strict=True):
            _check_split(case, by_rank, f" inside the group {list(MEMBERS)}")

    def _test_refusals(self, grade: Grade) -> None:
        for n, case, named in self.refused:
            _judge_refusal(grade, n, case, named)


def _plain(method: Callable[[Grade], None]) -> Callable[[Grade], None]:
    """Wrap a method in a plain function, since methods cannot be marked."""

    def test(grade: Grade) -> None:
        method(grade)

    return test


# Tasks 2.13 and 2.14: linear layers


def _linear(layer: str, grade: Grade, n: int) -> list[b.Case]:
    """Draw linear layers with and without bias; each rank's share of one of the sizes is odd."""
    a, c = grade.random.randint(1, 3), 2 * grade.random.randint(1, 2) + 1
    rows = grade.random.choice((1, 3, 5))
    cases = [
        b.Case(layer, (a * n, c * n), (rows, 7), is_transposed=True),
        b.Case(layer, (c * n, a * n), (rows,), has_bias=False, num_passes=2),
    ]
    if layer == b.COLUMN:
        cases += [replace(cases[0], gathers=True)]
    if n <= 3:  # add the smallest case: one feature per rank, one row
        cases += [b.Case(layer, (n, n), (), gathers=layer == b.COLUMN)]
    return cases


def _variants_of_linear(layer: str, grade: Grade, n: int) -> list[b.Case]:
    sizes = (2 * n + 1, 3 * n) if layer == b.COLUMN else (2 * n, 3 * n + 1)
    case = b.Case(layer, sizes, (3,))  # n divides only the size that is split
    changes = [{"frozen": ("weight",)}, {"frozen": ("bias",)}, {"is_input_trained": False}]
    frozen = [replace(case, **change) for change in changes]  # type: ignore[arg-type]
    return frozen + _dtypes(replace(case, gathers=layer == b.COLUMN))


def _dtypes(case: b.Case) -> list[b.Case]:
    return [replace(case, dtype=dtype) for dtype in ("float32", "bfloat16")]


# Task 2.15: an MLP and attention


def _module(function: str, grade: Grade, n: int, **more: Any) -> b.Case:
    """Draw a case for an MLP or attention: n divides the heads, but not always the MLP's width."""
    heads = n * grade.random.randint(1, 2)
    width = heads * grade.random.choice((2, 3))
    if function == b.MLP_SPLIT:
        width = n // gcd(n, 4) * (3 if n % 2 == 0 else 1)  # so that n divides four times the width
    rows = grade.random.choice((1, 3)), grade.random.choice((3, 5))
    return b.Case(function, (width, heads), rows, **more)


def _variants_of_module(function: str, grade: Grade, n: int) -> list[b.Case]:
    frozen = "up.weight", "down.bias", "key.weight", "key.bias"
    case = partial(_module, function, grade, n)
    return [
        case(has_bias=False, is_transposed=True),
        case(frozen=frozen, num_passes=2),
        case(dtype="bfloat16"),
        case(is_input_trained=False),
    ]


# Task 2.16: an embedding


def _embedding(grade: Grade, n: int) -> list[b.Case]:
    shapes = (5,), (3, 7), (1, 2, 3)
    sizes = n * grade.random.randint(1, 3), grade.random.randint(2, 4)
    cases = [b.Case(b.EMBEDDING, sizes, grade.random.choice(shapes), num_passes=2)]
    return [*cases, *([b.Case(b.EMBEDDING, (2 * n, 3), ())] if n == 1 else [])]


# Task 2.17: a block


def _block(grade: Grade, n: int, **more: Any) -> b.Case:
    # Each rank returns all its weights, so a block for many ranks is kept small.
    heads, head_width = (n * grade.random.randint(1, 2), 3) if n <= 3 else (n, 1)
    rows = grade.random.choice((1, 3)), n * grade.random.randint(1, 2)
    return b.Case(b.BLOCK_SPLIT, (head_width * heads, heads), rows, **more)


def _variants_of_block(grade: Grade, n: int) -> list[b.Case]:
    frozen = "mlp_norm.weight", "attention_norm.bias", "down.bias", "query.weight"
    case = partial(_block, grade, n)
    return [
        case(has_bias=False),
        case(frozen=frozen, is_transposed=True),
        case(num_passes=3),
        case(dtype="bfloat16"),
    ]


CONTRACTS = [
    Contract(
        *("2.13", "a_column_parallel_layer", partial(_linear, b.COLUMN)),
        variants=partial(_variants_of_linear, b.COLUMN),
        refused=[(4, b.Case(b.COLUMN, (8, 10), (1,)), "10")],
    ),
    Contract(
        *("2.14", "a_row_parallel_layer", partial(_linear, b.ROW)),
        variants=partial(_variants_of_linear, b.ROW),
        refused=[(4, b.Case(b.ROW, (10, 8), (1,)), "10")],
    ),
    Contract(
        *("2.15", "an_mlp", lambda grade, n: [_module(b.MLP_SPLIT, grade, n)]),
        variants=partial(_variants_of_module, b.MLP_SPLIT),
        refused=[(8, b.Case(b.MLP_SPLIT, (3, 1), (1, 2)), "12")],
    ),
    Contract(
        *("2.15", "attention", lambda grade, n: [_module(b.ATTENTION_SPLIT, grade, n)]),
        variants=partial(_variants_of_module, b.ATTENTION_SPLIT),
        refused=[  # an even split of the rows would cut a head in half
            (2, b.Case(b.ATTENTION_SPLIT, (12, 3), (1, 2)), "3"),
            (2, b.Case(b.ATTENTION_SPLIT, (8, 1), (1, 2)), "1"),
        ],
    ),
    Contract(
        *("2.16", "an_embedding", _embedding),
        variants=lambda _, n: [
            *_dtypes(b.Case(b.EMBEDDING, (3 * n, 3), (4,))),
            b.Case(b.EMBEDDING, (3 * n, 3), (4,), frozen=("weight",)),
        ],
        refused=[(4, b.Case(b.EMBEDDING, (10, 4), (1,)), "10")],
    ),
    Contract(
        *("2.17", "a_block", lambda grade, n: [_block(grade, n)]),
        variants=_variants_of_block,
        refused=[(2, b.Case(b.BLOCK_SPLIT, (12, 3), (1, 2)), "3")],
    ),
]
for contract in CONTRACTS:
    globals().update(contract.tests())


# Task 2.16: a cross-entropy; no rank ever holds the logits of the whole vocabulary


CAUSE = (
    "Greatest logit and sum of exponentials are those of all ranks, and the target's logit is on "
    "one rank: the others add 0. A target of -100 has a loss of 0."
)


def _check_losses(case: b.Scores, by_rank: Sequence[Any], where: str = "") -> None:
    n = len(by_rank)
    logits = case.logits().detach().requires_grad_()
    flat = logits.flatten(0, -2) if case.shape else logits[None]
    losses = cross_entropy(flat, case.targets().flatten(), reduction="none").view(case.shape)
    (losses * case.weights()).sum().backward()
    for rank, got in enumerate(by_rank):
        here = f"{b.LOSS}, {case}, rank {rank} of {n}{where}"
        c.check_same(here, "the losses", losses, got["losses"], n, CAUSE)
        part = b.rank_part(logits.grad, rank, n, -1)  # type: ignore[arg-type]
        c.check_same(
            *(here, "the gradient of logits", part, got["logits"], n),
            "It is softmax over the whole vocabulary, minus 1 at the target, times the gradient of "
            "the loss. Every rank has all that it takes.",
        )
        expect(f"{here}: what has changed of logits and targets", got["changed"], [])


def _check_numbers(run: Run, case: b.Scores) -> None:
    """Check that forward sends at most 3 values per target in three calls, and backward none."""
    numbers = 3 * torch.Size(case.shape).numel()
    most = numbers * getattr(torch, case.dtype).itemsize
    for rank, by_stage in enumerate(c.calls_of(run)) if len(run.results) > 1 else ():
        here = f"{b.LOSS}, {case}, rank {rank} of {len(run.results)}"
        c.check_barriers(here, len(by_stage), 3)
        _, forward, backward = by_stage
        check_cost(
            {name for name, _ in forward} <= {"all_reduce"}
            and len(forward) <= 3
            and sum(size for _, size in forward) <= most
            and not backward,
            f"{here}: forward needs at most three all-reduces, together of three numbers per "
            f"target, {most:,} bytes, and backward none; they made {forward} and {backward}. "
            "Logits stay where they are: send what each rank has computed of them. The losses are "
            "the same on all ranks, and so are their gradients.",
        )


def _judge_losses(grade: Grade, n: int, case: b.Scores) -> None:
    run = grade.run(b.loss_case, n, case)
    _check_losses(case, run.results)
    if grade.is_simulated:
        _check_numbers(run, case)


@task("2.16", real=True)
def test_a_cross_entropy_is_split_by_tokens(grade: Grade) -> None:
    for n in c.sizes_for(grade):
        shape = grade.random.choice(((5,), (3, 7), (1, 5)))
        case = b.Scores(n * grade.random.randint(2, 4), shape, has_ignored=True)
        _judge_losses(grade, n, case)
        _judge_losses(grade, n, b.Scores(n, ()))  # one token per rank


@task("2.16")
def test_losses_have_the_dtype_of_the_logits_and_are_finite(grade: Grade) -> None:
    _judge_losses(grade, 2, b.Scores(6, (5,), dtype="float32"))
    _judge_losses(grade, 3, b.Scores(6, (3, 4), scale=2000.0, is_transposed=True))
    _judge_losses(grade, 3, b.Scores(6, (3, 4), offset=-2000.0))


@task("2.16")
def test_a_cross_entropy_is_split_inside_a_group(grade: Grade) -> None:
    case = b.Scores(6, (7,), has_ignored=True)
    _check_losses(case, results_in_group(grade, b.loss_case, case), f" inside {list(MEMBERS)}")
