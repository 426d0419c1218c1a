"""Judges task 2.14: identity one way, one all-reduce the other."""

from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import of_members, short_beside
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import regions as b
from phase2.sharding_checks import (
    Calls,
    check_calls,
    check_dtype,
    check_graph,
    check_others,
    check_shape,
    sizes_for,
)

COPY, REDUCE = "copy_to_tensor_region", "reduce_from_tensor_region"
SHAPES = (3, 5), (3, 5)
STAGES = ("forward", "backward")


@task("2.14", real=True)
@pytest.mark.parametrize("function", [COPY, REDUCE])
def test_a_region_sums_one_way_and_passes_on_the_other(grade: Grade, function: str) -> None:
    for n in sizes_for(grade):
        kinds = b.kinds_for(b.KINDS, n)
        sums = {kind: ("all_reduce", b.tensors_of(kind, 0).nbytes) for kind in kinds}
        forward = [*sums.values()]
        backward = [one for kind, one in sums.items() if kind != b.UNTRAINED]
        expected: list[Calls] = [[], backward] if function == COPY else [forward, []]
        run = grade.run(b.through_region, n, function, kinds, SHAPES)
        _check_regions(function, run.results)
        if grade.is_simulated:
            check_calls(
                *(run, f"{function} of {len(kinds)} tensors", STAGES, expected),
                "One direction passes on what it gets; the other needs one all-reduce, in the "
                "dtype of the tensor.",
            )


def _check_regions(function: str, by_rank: list[list[dict[str, Any]]]) -> None:
    n, is_copy = len(by_rank), function.startswith(COPY)
    for rank, of_rank in enumerate(by_rank):
        kinds = b.kinds_for(b.KINDS, n)
        for place, (kind, found) in enumerate(zip(kinds, of_rank, strict=True)):
            here = f"{function}, rank {rank} of {n}, {kind}"
            xs = [other[place]["x"] for other in by_rank]
            gradients = [other[place]["gradient"] for other in by_rank]
            _check_unchanged(here, found)
            shape = list(b.tensors_of(kind, 0).shape)
            check_shape(here, "the output", shape, found["y"], n)
            _check_one(here, "the output", found["y"], xs, rank, is_sum=not is_copy)
            if kind != b.UNTRAINED:
                check_graph(here, found["has_graph"])
                _check_one(here, "the gradient of x", found["x_grad"], gradients, rank, is_copy)
            check_dtype(here, found)
            check_others(here, found["is_alone"])
            check(
                not (is_copy and found["is_copied"]),
                f"{here}: the output should be x itself, or a view of it; it lies in memory of its "
                "own.",
            )


def _check_unchanged(here: str, found: dict[str, Any]) -> None:
    for name, before, after in (
        ("x", found["x"], found["x_after"]),
        ("the gradient that arrives", found["gradient"], found["after"]),
    ):
        check(
            before == after,
            f"{here}: {name} was {short_beside(before, after)}, and has become "
            f"{short_beside(after, before)}. all_reduce writes into what it is given; "
            "another operation may hold the same tensor: sum a copy.",
        )


def _check_one(here: str, what: str, got: Any, by_rank: list[Any], rank: int, is_sum: bool) -> None:
    total = _added(by_rank)
    expected = total if is_sum else by_rank[rank]
    cause = ""
    if got == total:
        cause = "That is the sum over the ranks. In this direction, pass on what arrives."
    elif got == by_rank[rank]:
        cause = "That is this rank's own, not summed over the ranks."
    elif "nan" in str(got):
        cause = "A difference of infinite numbers is nan: return the sum itself."
    wanted = "the sum over the ranks" if is_sum else "that of this rank"
    check(
        got == expected,
        f"{here}: {what} should be {wanted}, {short_beside(expected, got)}; it is "
        f"{short_beside(got, expected)}. {cause}",
    )


def _added(by_rank: list[Any]) -> Any:
    if isinstance(by_rank[0], list):
        return [_added(list(column)) for column in zip(*by_rank, strict=True)]
    return sum(by_rank)


@task("2.14")
@pytest.mark.parametrize("function", [COPY, REDUCE])
def test_regions_inside_a_group(grade: Grade, function: str) -> None:
    kinds = b.kinds_for(b.KINDS, len(MEMBERS))
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.through_region, function, kinds, SHAPES),
        if_stuck=STUCK_IN_GROUP,
    )
    _check_regions(f"{function} inside the group {list(MEMBERS)}", of_members(run))
