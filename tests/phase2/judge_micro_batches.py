"""Judges task 2.1: which rows are in which micro-batch, as views."""

from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted, joined
from judging.checks import check_refused, check_silent, short
from phase2 import accumulation as b

EVERY_ROW = "Every row belongs to one micro-batch, also those of an incomplete last one."


@task("2.1")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_micro_batches_are_consecutive_rows(grade: Grade, count: int) -> None:
    size = grade.random.randint(3, 5)
    for rows in (2 * size, 2 * size + 1, 3 * size - 1, size - 1):
        _check_split(grade, rows, size, count)


@task("2.1")
def test_micro_batches_of_extreme_sizes(grade: Grade) -> None:
    rows = grade.random.randint(4, 7)
    for size in (1, rows - 1, rows, rows + 1, 100 * rows):
        _check_split(grade, rows, size, 2)
    _check_split(grade, 1, 1, 3)


@task("2.1")
def test_a_batch_without_rows_has_no_micro_batches(grade: Grade) -> None:
    for size in (1, 5):
        _check_split(grade, 0, size, 3)


def _check_split(grade: Grade, rows: int, size: int, count: int) -> None:
    run = grade.run(b.split, 1, rows, size, count)
    check_silent(run, "split_micro_batches")
    (found,), batch = run.results, b.tensors_of(rows)[:count]
    here = f"a batch of {counted(count, 'tensor')} with {counted(rows, 'row')}, size {size}"
    check(
        found["types"][0] == "list" and {*found["types"][1:]} <= {"tuple"},
        f"{here}: split_micro_batches should return a list of tuples; yours returned "
        f"{_types_told(found['types'])}.",
    )
    _check_sizes(here, found["values"], [min(size, rows - i) for i in range(0, rows, size)], count)
    parts = [[tensor[i : i + size] for tensor in batch] for i in range(0, rows, size)]
    for number, part in enumerate(parts):
        _check_part(here, number, found, [tensor.tolist() for tensor in part])
        dtypes = [str(tensor.dtype) for tensor in batch]
        check(
            found["dtypes"][number] == dtypes,
            f"{here}: the tensors of micro-batch {number} should have the dtypes {dtypes}; they "
            f"have {found['dtypes'][number]}.",
        )


def _types_told(types: list[str]) -> str:
    """Write ``a generator``, or with what is in it ``a list of lists and tuples``."""
    outer, *inner = types
    return " of ".join(filter(None, [f"a {outer}", joined([f"{one}s" for one in inner])]))


def _check_sizes(here: str, values: list[Any], expected: list[int], count: int) -> None:
    for number, part in enumerate(values):
        check(
            len(part) == count,
            f"{here}: micro-batch {number} should have {counted(count, 'tensor')}, as the batch "
            f"has; it has {len(part)}. Every tensor is split.",
        )
    sizes = [[len(tensor) for tensor in part] for part in values]
    rows = f" with {short(expected)} rows in every tensor" if expected else ""
    check(
        sizes == [[rows] * count for rows in expected],
        f"{here}: there should be {counted(len(expected), 'micro-batch', 'micro-batches')}{rows}; "
        f"the rows of yours are {short(sizes)}. "
        + (EVERY_ROW if expected else "A batch without rows has none."),
    )


def _check_part(here: str, number: int, found: Any, expected: list[Any]) -> None:
    for i, (wanted, got) in enumerate(zip(expected, found["values"][number], strict=True)):
        check(
            got == wanted,
            f"{here}: tensor {i} of micro-batch {number} should be {short(wanted)}; it is "
            f"{short(got)}. Micro-batches are consecutive rows, in the order of the batch and the "
            "same in all tensors.",
        )
        check(
            found["are_views"][number][i],
            f"{here}: tensor {i} of micro-batch {number} should be a view of the batch's tensor, "
            "but it has memory of its own. Slices copy nothing; indexing with a list, stack and "
            "contiguous may copy.",
        )


@task("2.1")
def test_micro_batches_need_a_size_and_equal_rows(grade: Grade) -> None:
    for size in (0, -grade.random.randint(1, 3)):
        run = grade.run(b.split_badly, 1, [4, 4], size)
        check_refused(run.results, f"size = {size}", str(size))
    for rows in ([7, 6], [5, 5, 8], [0, 3]):
        run = grade.run(b.split_badly, 1, rows, 2)
        numbers = [str(count) for count in sorted(set(rows))]
        check_refused(run.results, f"A batch of tensors with {rows} rows", *numbers)
