"""Judges tasks 3.1 to 3.3: chunks, sums, who sends what to whom, rounds and memory."""

from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted
from judging.checks import (
    MEASURED,
    UNIFORM,
    check_no_collective,
    check_peak,
    check_waited,
    of_members,
    short,
    short_beside,
    uneven,
)
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from judging.tensors import numbers_of
from phase3 import ring as b
from phase3.ring_checks import (
    AS_NCCL,
    BEFORE,
    IN_GROUP,
    ITEM_BYTES,
    NOT_IN_A_BATCH,
    OF_MESSAGES,
    SLACK_BYTES,
    STUCK,
    check_all_reduce_sent,
    check_bytes_of_all_reduce,
    check_neighbours,
    check_rounds,
    check_same_bits,
    check_sent,
    check_sums,
    check_sums_of_powers,
    chunk_bytes,
    kind_text,
    sums_of,
    why_not_the_sum,
)

SIZES = [1, 2, 3, 4, 5, 8]


# 3.1 ring_reduce_scatter


@task("3.1")
@pytest.mark.parametrize("n", SIZES)
def test_reduce_scatter_sends_every_chunk_but_its_own(grade: Grade, n: int) -> None:
    num_elements = b.uneven_size(grade.random)
    run = grade.run(b.scatter_my_rank, n, num_elements, cluster=UNIFORM, if_stuck=STUCK)
    _check_chunks_of_powers(run.results)
    _check_ring(run)
    for rank in range(n):
        check_sent(run, rank, num_elements, rank, f"every chunk but chunk {rank}, once")
    check_rounds(run, num_elements, n - 1)


def _check_chunks_of_powers(by_rank: list[Any]) -> None:
    n = len(by_rank)
    total = float(2**n - 1)
    for rank, found in enumerate(by_rank):
        check(
            found == [total, total],
            f"rank {rank} of {n}: {BEFORE} the sum is {total:g}; the chunk that was returned holds "
            f"{found} (least and greatest). "
            f"{why_not_the_sum(found or (0.0, 0.0), rank, n)}",
        )


def _check_ring(run: Run) -> None:
    check_no_collective(run, OF_MESSAGES)
    check_neighbours(run)
    check_waited(run)


@task("3.1")
@pytest.mark.parametrize("n", [2, 3])
def test_reduce_scatter_cannot_deadlock_on_nccl(grade: Grade, n: int) -> None:
    num_elements = b.uneven_size(grade.random)
    run = grade.run(*(b.scatter_my_rank, n, num_elements), options=AS_NCCL, if_stuck=NOT_IN_A_BATCH)
    _check_chunks_of_powers(run.results)


@task("3.1", real=True)
@pytest.mark.parametrize("n", [2, 3])
def test_reduce_scatter_returns_its_chunk_of_the_sum(grade: Grade, n: int) -> None:
    _check_scattered(_of_all_kinds(grade, b.scatter_all_kinds, n).results)


@task("3.1")
@pytest.mark.parametrize("n", [1, 4, 5, 8])
def test_reduce_scatter_of_any_size(grade: Grade, n: int) -> None:
    _check_scattered(_of_all_kinds(grade, b.scatter_all_kinds, n).results)


def _of_all_kinds(grade: Grade, body: Any, n: int, *args: object) -> Run:
    run = grade.run(body, n, *args, options=uneven(grade.random, n), if_stuck=STUCK)
    if grade.is_simulated:
        check_waited(run)
    return run


def _check_scattered(by_rank: Sequence[Any], where: str = "") -> None:
    n = len(by_rank)
    for place, total in enumerate(sums_of(n)):
        chunks = [numbers_of(chunk) for chunk in total.view(-1).tensor_split(n)]
        for rank, of_rank in enumerate(by_rank):
            here, found = f"{where}rank {rank} of {n}, {kind_text(place)}", of_rank[place]
            _check_chunk(here, found, chunks, rank)
            _check_place(here, found, chunks[rank], rank)


def _check_chunk(here: str, found: Any, chunks: list[Any], rank: int) -> None:
    got, wanted = found["chunk"], chunks[rank]
    check(
        len(found["shape"]) == 1,
        f"{here}: the chunk should have one dimension; its shape is {found['shape']}. "
        "x.view(-1) has one.",
    )
    check(
        len(got) == len(wanted),
        f"{here}: chunk {rank} has {counted(len(wanted), 'element')}, but {len(got)} came back. "
        "tensor_split makes the first chunks one element longer if N does not divide the size.",
    )
    check(
        got == wanted,
        f"{here}: chunk {rank} of the sum is {short_beside(wanted, got)}; returned was "
        f"{short_beside(got, wanted)}. {_why_not_the_chunk(got, chunks)}",
    )


def _check_place(here: str, found: Any, wanted: Any, rank: int) -> None:
    check(
        found["is_view"],
        f"{here}: the chunk should be a view of x; yours has memory of its own. Add in the chunks "
        "of x: `chunk += …`.",
    )
    check(
        found["in_x"] == wanted,
        f"{here}: chunk {rank} of x should hold the sum; what you returned lies elsewhere in x, "
        f"and that chunk holds {short(found['in_x'])}.",
    )


def _why_not_the_chunk(got: Any, chunks: list[Any]) -> str:
    if got and got in chunks:
        return (
            f"That is chunk {chunks.index(got)} of the sum: begin one chunk earlier or later, so "
            "that the last one to arrive at rank r is chunk r."
        )
    return (
        "Is every chunk added once on every rank, in the dtype of x? A cast loses digits, and what "
        "is written into a chunk that is still to be sent arrives as well."
    )


@task("3.1")
@pytest.mark.parametrize("n", [2, 5])
def test_reduce_scatter_needs_one_chunk_of_memory(grade: Grade, n: int) -> None:
    num_elements = b.uneven_size(grade.random)
    run = grade.run(
        *(b.use_unwritten, n, b.SCATTER, num_elements), options=MEASURED, if_stuck=STUCK
    )
    _check_memory_of_a_chunk(run, num_elements)


def _check_memory_of_a_chunk(run: Run, num_elements: int) -> None:
    n = len(run.results)
    most = ITEM_BYTES * num_elements + max(chunk_bytes(num_elements, n)) + SLACK_BYTES
    check_peak(
        *(run, [most] * n),
        "A rank needs x and one chunk to receive into, which it can use again in every step. Send "
        "the chunks of x themselves, and add in place: x.clone() and a + b make tensors.",
    )


@task("3.1")
def test_reduce_scatter_inside_a_group(grade: Grade) -> None:
    _check_scattered(_inside_a_group(grade, b.scatter_all_kinds), IN_GROUP)


def _inside_a_group(grade: Grade, body: Any, *args: object) -> list[Any]:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, body, *args, if_stuck=STUCK_IN_GROUP)
    return of_members(run)


# 3.2 ring_all_gather


@task("3.2")
@pytest.mark.parametrize("n", SIZES)
def test_all_gather_passes_on_every_chunk(grade: Grade, n: int) -> None:
    num_elements = b.uneven_size(grade.random)
    run = grade.run(b.gather_my_rank, n, num_elements, cluster=UNIFORM, if_stuck=STUCK)
    _check_chunks_of_ranks(run.results)
    _check_ring(run)
    for rank in range(n):
        right = (rank + 1) % n
        which = f"every chunk but chunk {right}, which rank {right} brings itself, once"
        check_sent(run, rank, num_elements, right, which)
    check_rounds(run, num_elements, n - 1)


def _check_chunks_of_ranks(by_rank: list[Any]) -> None:
    n = len(by_rank)
    for rank, chunks in enumerate(by_rank):
        wrong = {chunk: held for chunk, held in enumerate(chunks) if held != [float(chunk)]}
        check(
            not wrong,
            f"rank {rank} of {n}: rank r brings chunk r, full of the number r; before the call, "
            f"the other chunks of x hold -1. After it, {_chunks_text(wrong)}. In each step, pass "
            "on the chunk that arrived last, and receive the one before it, into its place in x.",
        )


def _chunks_text(wrong: dict[int, Any]) -> str:
    told = [f"chunk {chunk} holds {short(held)}" for chunk, held in [*wrong.items()][:3]]
    return ", ".join(told) + (", …" if len(wrong) > len(told) else "")


@task("3.2")
@pytest.mark.parametrize("n", [2, 3])
def test_all_gather_cannot_deadlock_on_nccl(grade: Grade, n: int) -> None:
    num_elements = b.uneven_size(grade.random)
    run = grade.run(*(b.gather_my_rank, n, num_elements), options=AS_NCCL, if_stuck=NOT_IN_A_BATCH)
    _check_chunks_of_ranks(run.results)


@task("3.2", real=True)
@pytest.mark.parametrize("n", [2, 3])
def test_all_gather_collects_every_kind(grade: Grade, n: int) -> None:
    _check_gathered(_of_all_kinds(grade, b.gather_all_kinds, n).results)


@task("3.2")
@pytest.mark.parametrize("n", [1, 4, 5, 8])
def test_all_gather_of_any_size(grade: Grade, n: int) -> None:
    _check_gathered(_of_all_kinds(grade, b.gather_all_kinds, n).results)


def _check_gathered(by_rank: Sequence[Any], where: str = "") -> None:
    n = len(by_rank)
    for place, whole in enumerate(b.tensors_of(0)):
        wanted = numbers_of(whole)
        for rank, tensors in enumerate(by_rank):
            got = tensors[place]
            check(
                got == wanted,
                f"{where}rank {rank} of {n}, {kind_text(place)}: the chunks of all ranks are "
                f"{short_beside(wanted, got)}, but x is {short_beside(got, wanted)}. Are the "
                "chunks views of x, as x.view(-1).tensor_split returns them? Some are empty if "
                "there are fewer elements than ranks.",
            )


@task("3.2")
@pytest.mark.parametrize("n", [2, 5])
def test_all_gather_needs_no_memory(grade: Grade, n: int) -> None:
    num_elements = b.uneven_size(grade.random)
    run = grade.run(*(b.use_unwritten, n, b.GATHER, num_elements), options=MEASURED, if_stuck=STUCK)
    check_peak(
        *(run, [ITEM_BYTES * num_elements + SLACK_BYTES] * n),
        "A rank needs x alone: a chunk can be received into its place in x.",
    )


@task("3.2")
def test_all_gather_inside_a_group(grade: Grade) -> None:
    _check_gathered(_inside_a_group(grade, b.gather_all_kinds), IN_GROUP)


# 3.3 ring_all_reduce


@task("3.3")
@pytest.mark.parametrize("n", SIZES)
def test_all_reduce_sends_the_least_bytes(grade: Grade, n: int) -> None:
    num_elements = b.uneven_size(grade.random)
    run = grade.run(*(b.reduce_my_rank, n, b.REDUCE, num_elements), cluster=UNIFORM, if_stuck=STUCK)
    check_sums_of_powers(run)
    _check_ring(run)
    check_all_reduce_sent(run, num_elements)
    check_bytes_of_all_reduce(run, num_elements)
    check_rounds(run, num_elements, 2 * (n - 1))


@task("3.3")
@pytest.mark.parametrize("n", [3, 5, 8])
def test_a_short_tensor_travels_around_the_ring_too(grade: Grade, n: int) -> None:
    num_elements = grade.random.randrange(1, n)  # so that some chunks are empty
    run = grade.run(*(b.reduce_my_rank, n, b.REDUCE, num_elements), if_stuck=STUCK)
    check_sums_of_powers(run)
    _check_ring(run)
    check_bytes_of_all_reduce(run, num_elements)


@task("3.3", real=True)
@pytest.mark.parametrize("n", [2, 3])
def test_all_reduce_sums_every_kind(grade: Grade, n: int) -> None:
    check_sums(_of_all_kinds(grade, b.reduce_all_kinds, n, b.REDUCE).results)


@task("3.3")
@pytest.mark.parametrize("n", [1, 4, 5, 8])
def test_all_reduce_of_any_size(grade: Grade, n: int) -> None:
    check_sums(_of_all_kinds(grade, b.reduce_all_kinds, n, b.REDUCE).results)


@task("3.3")
def test_all_reduce_gives_all_ranks_the_same_bits(grade: Grade) -> None:
    num_elements = grade.random.randrange(500, 1000)
    check_same_bits(grade.run(b.reduce_fractions, 5, b.REDUCE, num_elements, if_stuck=STUCK))


@task("3.3")
@pytest.mark.parametrize("n", [2, 5])
def test_all_reduce_needs_one_chunk_of_memory(grade: Grade, n: int) -> None:
    num_elements = b.uneven_size(grade.random)
    run = grade.run(*(b.use_unwritten, n, b.REDUCE, num_elements), options=MEASURED, if_stuck=STUCK)
    _check_memory_of_a_chunk(run, num_elements)


@task("3.3")
def test_all_reduce_inside_a_group(grade: Grade) -> None:
    check_sums(_inside_a_group(grade, b.reduce_all_kinds, b.REDUCE), IN_GROUP)
