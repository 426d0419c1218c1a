"""Judges task 1.3: rows that come where they belong, and nothing but rows."""

from typing import Any

import pytest

from distlab.grade import Grade, check, task
from phase1 import data_loader as d
from phase1.groups import OUTER_WORLD_SIZE, inside_group
from phase1.judging import of_members

# 1.3 scatter_batch


@task("1.3", real=True)
@pytest.mark.parametrize(("n", "rows", "src"), [(4, 10, 0), (3, 7, 2), (5, 3, 1), (1, 4, 0)])
def test_every_rank_gets_its_rows(grade: Grade, n: int, rows: int, src: int) -> None:
    _check_scattered(grade.run(d.scatter, n, rows, src, {}).results, rows)


def _check_scattered(by_rank: list[Any], rows: int) -> None:
    n, start = len(by_rank), 0
    for rank, part in enumerate(by_rank):
        mine = list(range(start, start + rows // n + (rank < rows % n)))
        start += len(mine)
        check(
            part["images"] == mine and part["labels"] == [10 * row for row in mine],
            f"rank {rank} of {n} should get rows {mine} of {rows}; it has images "
            f"{part['images']} and labels {part['labels']}. 10 rows on 4 ranks are 3, 3, 2, 2.",
        )
        check(
            part["shapes"][0] == [len(mine), 2, 250] and part["dtypes"][0] == "torch.float32",
            f"rank {rank} of {n}: its images should be float32 of {[len(mine), 2, 250]}; they are "
            f"{part['dtypes'][0]} of {part['shapes'][0]}. Only the header can tell it.",
        )


@task("1.3")
@pytest.mark.parametrize(
    ("image_dtype", "label_dtype", "label_shape"),
    [("uint8", "uint8", ()), ("float64", "float32", (3,)), ("float32", "int16", (2, 2))],
)
def test_any_dtypes_and_shapes_arrive(
    grade: Grade, image_dtype: str, label_dtype: str, label_shape: tuple[int, ...]
) -> None:
    kinds = {"image_dtype": image_dtype, "label_dtype": label_dtype, "label_shape": label_shape}
    sent = [[2, 2, 250], [2, *label_shape]], [f"torch.{image_dtype}", f"torch.{label_dtype}"]
    for rank, part in enumerate(grade.run(d.scatter, 3, 6, 0, kinds).results):
        for what, shape, dtype, got_shape, got_dtype in zip(
            ("images", "labels"), *sent, part["shapes"], part["dtypes"], strict=True
        ):
            check(
                (got_shape, got_dtype) == (shape, dtype),
                f"rank {rank} of 3: its {what} should be {dtype} of {shape}, as on the source; "
                f"they are {got_dtype} of {got_shape}. Send dtypes and shapes in the header too.",
            )
        mine = [2 * rank, 2 * rank + 1]
        check(
            part["images"] == mine and part["labels"] == [10 * row for row in mine],
            f"rank {rank} of 3: {image_dtype} images and {label_dtype} labels of rows {mine} "
            f"should arrive as they were; it has {part['images']} and {part['labels']}.",
        )


@task("1.3")
def test_only_the_rows_travel(grade: Grade) -> None:
    n, rows = 4, 128
    run = grade.run(d.scatter, n, rows, 0, {})
    row_bytes = 500 * 4 + 8
    expected = row_bytes * rows * (n - 1) // n
    sent = [int(number) for number in run.bytes_sent]
    check(
        expected <= sent[0] <= expected + 8_000,
        f"the source should send {expected} bytes and a small header, it sends {sent[0]}. "
        "Every row goes to one rank only.",
    )
    check(
        max(sent[1:]) <= 8_000,
        f"only the source has rows to send; the ranks send {sent} bytes. Broadcasting the whole "
        "batch does that.",
    )
    check(
        sum(run.messages) <= 10 * (n - 1),
        f"images and labels for {n - 1} ranks are {2 * (n - 1)} messages, and the header needs a "
        f"few; {sum(run.messages)} were sent. Send a rank's rows as one tensor: each message "
        "costs α.",
    )


@task("1.3")
@pytest.mark.parametrize("what", ["nothing", "6 images and 5 labels"])
def test_every_rank_hears_of_a_wrong_batch(grade: Grade, what: str) -> None:
    for rank, text in enumerate(grade.run(d.scatter_what_is_wrong, 3, what).results):
        check(
            text,
            f"the source has {what}: every rank should raise a ValueError, rank {rank} "
            "raises none. Send the bad news as the header.",
        )


@task("1.3")
def test_scattering_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, d.scatter, 8, 1, {})
    _check_scattered(of_members(run), 8)
