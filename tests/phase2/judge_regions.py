"""Judges tasks 2.12 and 2.17: regions with one operation forward and its counterpart backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.grade import Grade, check, task
from judging.checks import check_refused
from judging.expect import expect, over, results_in_group
from judging.groups import MEMBERS
from phase2 import sharding_checks as c
from phase2 import tensor_parallel as b
from phase2.tensor_parallel import rank_part

COPY, REDUCE = "copy_to_tensor_region", "reduce_from_tensor_region"
GATHER, SCATTER = "gather_from_sequence_region", "reduce_scatter_to_sequence_region"
OPERATIONS = {  # function -> operations in the forward and in the backward pass
    COPY: ("pass on", "sum"),
    REDUCE: ("sum", "pass on"),
    GATHER: ("join", "scatter"),
    SCATTER: ("scatter", "join"),
}
# Result of each operation on a rank, as a function of all ranks' tensors and the rank.
RESULTS: dict[str, Callable[[list[Tensor], int], Tensor]] = {
    "pass on": lambda xs, rank: xs[rank],
    "sum": lambda xs, rank: sum(xs[1:], xs[0]),
    "join": lambda xs, rank: torch.cat(xs, 1),
    "scatter": lambda xs, rank: rank_part(sum(xs[1:], xs[0]), rank, len(xs), 1),
}
COLLECTIVES = {"sum": "all_reduce", "join": "all_gather", "scatter": "reduce_scatter"}
OF_POSITIONS = (
    "One direction joins the ranks' positions in the order of the ranks; the other sums over the "
    "ranks, and keeps this rank's positions."
)
CAUSES = {
    "pass on": "It should be that of this rank, not summed over the ranks: pass on what arrives.",
    "sum": "It should be the sum over the ranks, not this rank's own.",
    "join": OF_POSITIONS,
    "scatter": OF_POSITIONS,
}
OF_CALLS = (
    "One direction passes on what it gets; the other needs one all-reduce, in the dtype of the "
    "tensor.",
    "Send what each rank keeps, and no more: an all-reduce sends twice the bytes of a "
    "reduce-scatter.",
)
Shapes = tuple[tuple[int, ...], tuple[int, ...]]  # shapes of input and output


def _is_of_positions(function: str) -> bool:
    return function in (GATHER, SCATTER)


def _kinds(function: str, n: int) -> tuple[str, ...]:
    """Return the kinds of tensor to test: all of them on up to three ranks, two on more."""
    kinds = b.SEQUENCE_KINDS if _is_of_positions(function) else b.REGION_KINDS
    return kinds if n <= 3 else kinds[:2]


def _shapes(function: str, n: int) -> Shapes:
    part, whole = (3, 2, 2, 3), (3, 2 * n, 2, 3)
    return {GATHER: (part, whole), SCATTER: (whole, part)}.get(function, ((3, 5), (3, 5)))


def _judge_region(grade: Grade, function: str) -> None:
    for n in c.sizes_for(grade):
        run = grade.run(b.through_region, n, function, _kinds(function, n), _shapes(function, n))
        _check_region(function, run.results)
        if grade.is_simulated:
            what, cause = f"{function} of many tensors", OF_CALLS[_is_of_positions(function)]
            c.check_calls(c.calls_of(run), what, _calls(function, n), cause)


def _judge_region_in_group(grade: Grade, function: str) -> None:
    n = len(MEMBERS)
    args = function, _kinds(function, n), _shapes(function, n)
    results = results_in_group(grade, b.through_region, *args)
    _check_region(f"{function} inside the group {list(MEMBERS)}", results)


def _check_region(what: str, by_rank: Sequence[Any]) -> None:
    function, n = what.partition(" ")[0], len(by_rank)
    forward, backward = OPERATIONS[function]
    for rank, of_rank in enumerate(by_rank):
        for place, kind in enumerate(_kinds(function, n)):
            here, found = f"{what}, rank {rank} of {n}, {kind}", of_rank[place]
            of_all = [results[place] for results in by_rank]
            _check_values(here, "output", forward, of_all, rank)
            if kind != b.UNTRAINED:
                c.check_graph(here, found["has_graph"])
                _check_values(here, "gradient of x", backward, of_all, rank)
            expected, got = found["dtypes"]
            expect(f"{here}: the dtype of the output", got, expected)
            c.check_use(here, found)
            check(
                not (function == COPY and found["is_copied"]),
                f"{here}: the output should be x itself, or a view of it; it lies in memory of its "
                "own.",
            )


def _check_values(here: str, what: str, operation: str, of_all: list[Any], rank: int) -> None:
    given, result = ("x", "y") if what == "output" else ("gradient", "x_grad")
    tensors = [torch.tensor(found[given], dtype=torch.float64) for found in of_all]
    expected, got = RESULTS[operation](tensors, rank), of_all[rank][result]
    cause = CAUSES[operation]
    if "nan" in str(got):
        cause = "A difference of infinite numbers is nan: return the sum itself."
    c.check_same(here, f"the {what}", expected, got, len(of_all), cause)


def _calls(function: str, n: int) -> dict[str, c.Calls]:
    """Return the expected collectives of each pass, in the order of the kinds of tensor."""
    part, _ = _shapes(function if not _is_of_positions(function) else GATHER, n)
    calls: dict[str, c.Calls] = {}
    for stage, operation in zip(("forward", "backward"), OPERATIONS[function], strict=True):
        kinds = [k for k in _kinds(function, n) if stage == "forward" or k != b.UNTRAINED]
        times = n if operation == "scatter" else 1
        sizes = [times * b.tensor_of(kind, 0, 0, part).nbytes for kind in kinds]
        name = COLLECTIVES.get(operation)
        calls[stage] = [(name, size) for size in sizes] if name else []
    return calls


OF_SUMS, OF_JOINS = (COPY, REDUCE), (GATHER, SCATTER)
test_a_region_sums_one_way_and_passes_on_the_other = task("2.12", real=True)(
    over(OF_SUMS, _judge_region)
)
test_regions_inside_a_group = task("2.12")(over(OF_SUMS, _judge_region_in_group))
test_a_region_joins_positions_one_way_and_sums_the_other = task("2.17", real=True)(
    over(OF_JOINS, _judge_region)
)
test_sequence_regions_inside_a_group = task("2.17")(over(OF_JOINS, _judge_region_in_group))


@task("2.17")
def test_positions_that_cannot_be_split_are_refused(grade: Grade) -> None:
    run = grade.run(
        *(b.refused_positions, 4, 10),
        if_stuck="10 positions cannot be split evenly over 4 ranks: raise a ValueError before "
        "anything is sent. ",
    )
    check_refused(run.results, f"{SCATTER} of 10 positions on 4 ranks", "10", "4", text="same")
