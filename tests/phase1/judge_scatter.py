"""Judges task 1.3: rows arrive where they belong, and little else is sent."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted
from judging.checks import MEASURED, check_peak, check_refused, of_members, short
from judging.expect import expect
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase1 import scatter as s

HEADER_BYTES, HEADER_CALLS = 1_000, 2  # a broadcast_object_list: a length, then the object
ONLY_SOURCE_RAISES = (
    "An error that only the source raises leaves the others waiting: send it in place of the "
    "shapes, so that every rank raises it."
)
KINDS = [  # number of ranks, source, kind of batch
    (4, 0, s.Kind(10)),
    (5, 1, s.Kind(3, "float64", (2, 250), "float32", (3,))),
]
MORE_KINDS = [
    (4, 3, s.Kind(150, "float32", (2, 251), "bool")),
    (3, 1, s.Kind(8, "float16", (3, 4), "int16", (2,), is_strided=True)),
    (2, 1, s.Kind(1, "bfloat16", (3, 1, 2), "float64")),
    (3, 0, s.Kind(0)),
    (1, 0, s.Kind(4)),
    (4, None, s.Kind(9, "uint8", (3, 4), "int32")),
]


@task("1.3", real=True)
@pytest.mark.parametrize(("n", "src", "kind"), KINDS, ids=str)
def test_every_rank_gets_its_rows(grade: Grade, n: int, src: int, kind: s.Kind) -> None:
    _check_kind(grade, n, src, kind)


@task("1.3")
@pytest.mark.parametrize(("n", "src", "kind"), MORE_KINDS, ids=str)
def test_any_shapes_and_dtypes_arrive(grade: Grade, n: int, src: int | None, kind: s.Kind) -> None:
    _check_kind(grade, n, src, kind)


def _check_kind(grade: Grade, n: int, src: int | None, kind: s.Kind) -> None:
    kind = replace(kind, seed=grade.random.randrange(10**6))
    run = grade.run(s.scatter, n, kind, src)
    _check_scattered(run.results, kind, src or 0)
    if grade.is_simulated:
        _check_traffic(run, kind, src or 0, range(n))


def _check_scattered(by_rank: Sequence[Any], kind: s.Kind, src: int) -> None:
    n = len(by_rank)
    batch = dict(zip(("images", "labels"), kind.batch(), strict=True))
    for rank, found in enumerate(by_rank):
        here = f"rank {rank} of {n}"
        expect(f"{here}: the type that scatter_batch returns", found["type"], "tuple")
        rows = _rows_of(kind.rows, n, rank)
        for what, whole in batch.items():
            _check_part(found[what], whole[rows.start : rows.stop], f"{here}: {what}", rows)
        check(
            rank != src or all(found["is_view"]),
            f"{here} is the source: its rows should be views of the batch, but they are copies in "
            "other memory. Slices and tensor_split copy nothing.",
        )


def _rows_of(rows: int, n: int, rank: int) -> range:
    """The rows of a rank: 4 ranks share 10 rows as 3, 3, 2 and 2."""
    starts = [k * (rows // n) + min(k, rows % n) for k in (rank, rank + 1)]
    return range(*starts)


def _check_part(found: Any, expected: Any, here: str, rows: range) -> None:
    shape, dtype, device, numbers = found
    expect(
        f"{here}, by shape, dtype and device,",
        [shape, dtype, device],
        [list(expected.shape), str(expected.dtype), "cpu"],
        "4 ranks share 10 rows as 3, 3, 2 and 2; every rank learns dtypes and shapes from the "
        "source.",
    )
    check(
        numbers == s.bytes_of(expected),
        f"{here} should be rows {[*rows]} of the batch, bit for bit, but other numbers arrived. Of "
        "10 rows, 4 ranks get rows 0-2, 3-5, 6-7 and 8-9, whatever the dtype, and even if the "
        "batch is not contiguous.",
    )


def _check_traffic(run: Run, kind: s.Kind, src: int, members: Sequence[int]) -> None:
    """Check for two messages to each rank that gets rows, one header, and nothing else."""
    assert run.trace
    row_bytes = [t[:1].nbytes for t in replace(kind, rows=1, is_strided=False).batch()]
    sends = [event for event in run.trace.events if event.kind == "send"]
    for rank, member in enumerate(members):
        rows = len(_rows_of(kind.rows, len(members), rank)) if rank != src else 0
        wanted = [rows * num_bytes for num_bytes in row_bytes] if rows else []
        got = [e.num_bytes for e in sends if (e.rank, e.peer) == (members[src], member)]
        check(
            Counter(got) == Counter(wanted),
            f"the source should send messages of {short(wanted)} bytes to rank {rank} of "
            f"{len(members)}, which gets {counted(rows, 'row')} from it; it sends messages of "
            f"{short(got)} bytes. Send images and labels in one message each, in their own dtype, "
            "and every row to one rank only; zero rows, and those that the source keeps, need no "
            "message.",
        )
    others = sorted({(e.rank, e.peer) for e in sends if e.rank != members[src]})
    expect("the messages of ranks other than the source, as (from, to),", others, [])
    _check_header(run, members)
    unwaited = run.trace.unwaited
    check(
        not unwaited,
        f"sends are still under way when scatter_batch returns:\n{chr(10).join(unwaited[:4])}\nThe "
        "network may still read the rows: wait for each send.",
    )


def _check_header(run: Run, members: Sequence[int]) -> None:
    assert run.trace
    calls = [event for event in run.trace.events if event.kind == "collective"]
    for rank, member in enumerate(members):
        mine = [event for event in calls if event.rank == member]
        num_bytes = sum(event.num_bytes for event in mine)
        names = Counter(event.name for event in mine)
        check(
            names.total() <= HEADER_CALLS and not names.keys() - {"broadcast"},
            f"rank {rank} of {len(members)}: one broadcast_object_list for the shapes makes "
            f"{HEADER_CALLS} collective calls; this rank called {dict(names)}. One list can hold "
            "everything that the other ranks must know.",
        )
        check(
            num_bytes < HEADER_BYTES,
            f"rank {rank} of {len(members)}: shapes and dtypes take less than {HEADER_BYTES:,} "
            f"bytes; your broadcasts take {num_bytes:,}. Send every row to one rank only, and "
            "broadcast only shapes and dtypes.",
        )


@task("1.3")
def test_nobody_holds_more_than_it_needs(grade: Grade) -> None:
    n, src, rows = 4, 1, grade.random.randint(100, 200)
    kind = s.Kind(rows, "float32", (10, 25), "int64")
    run = grade.run(s.scatter, n, kind, src, options=MEASURED)
    _check_scattered(run.results, kind, src)
    row_bytes = 10 * 25 * 4 + 8
    needed = [
        row_bytes * (rows if rank == src else len(_rows_of(rows, n, rank))) + 2 * HEADER_BYTES
        for rank in range(n)
    ]
    check_peak(
        run,
        needed,
        f"It needs its rows (rank {src}: the whole batch) and the shapes: send contiguous rows "
        "without copying them, and receive rows into the tensors that you return.",
    )


@task("1.3")
@pytest.mark.parametrize("what", s.WRONG_BATCHES)
def test_every_rank_hears_of_a_wrong_batch(grade: Grade, what: str) -> None:
    run = grade.run(s.scatter_what_is_wrong, 3, what, 1, if_stuck=ONLY_SOURCE_RAISES)
    check_refused(run.results, f"{what} on the source", text="same")
    _check_traffic(run, s.Kind(0), 1, range(3))
    alone = grade.run(s.scatter_what_is_wrong, 1, what, 0)
    check_refused(alone.results, f"{what} on the source")


@task("1.3")
@pytest.mark.parametrize("is_text", [False, True], ids=["device", "text"])
def test_rows_arrive_on_the_device(grade: Grade, is_text: bool) -> None:
    n, src = 3, 1
    kind = s.Kind(7, seed=grade.random.randrange(10**6))
    for rank, found in enumerate(grade.run(s.scatter_on_device, n, kind, src, is_text).results):
        device, rows = found["device"], _rows_of(kind.rows, n, rank)
        here = f"rank {rank} of {n}, with device={repr(device) if is_text else f'torch.{device}'}"
        expect(f"{here}: the devices of images and labels", found["devices"], [device] * 2)
        expect(
            f"{here}: the devices of the tensors that are sent or received",
            sorted({*found["travelled"][-(2 * (n - 1) if rank == src else 2) :]}),
            [device],
            "NCCL only sends tensors on GPUs.",
        )
        check(
            found["numbers"] == [s.bytes_of(t[rows.start : rows.stop]) for t in kind.batch()],
            f"{here}: rows {[*rows]} should arrive, but other numbers arrived.",
        )


@task("1.3")
@pytest.mark.parametrize(("src", "rows"), [(1, 8), (None, 4)])
def test_scattering_inside_a_group(grade: Grade, src: int | None, rows: int) -> None:
    kind = s.Kind(rows, seed=grade.random.randrange(10**6))
    args = inside_group, OUTER_WORLD_SIZE
    run = grade.run(*args, s.scatter, kind, src, if_stuck=STUCK_IN_GROUP)
    _check_scattered(of_members(run), kind, src or 0)
    _check_traffic(run, kind, src or 0, MEMBERS)
    what = "6 images and 5 labels"
    run = grade.run(*args, s.scatter_what_is_wrong, what, 1, if_stuck=ONLY_SOURCE_RAISES)
    check_refused(of_members(run), f"{what} on the source of a group", text="same")
