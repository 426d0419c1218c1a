"""Judges task 1.3: rows arrive where they belong, and little else is sent."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted
from judging.checks import MEASURED, check_peak, check_refused, of_members, short
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase1 import scatter as s

HEADER_BYTES, HEADER_CALLS = 1_000, 2  # of a broadcast_object_list: a length, then the object
ONLY_SOURCE_RAISES = (
    "An error that only the source raises leaves the others waiting: send it in place of the "
    "shapes, so that every rank raises it."
)
KINDS = [  # number of ranks, source, what
    (4, 0, s.Kind(10)),
    (3, 2, s.Kind(7, "uint8", (5,), "uint8")),
    (5, 1, s.Kind(3, "float64", (2, 250), "float32", (3,))),
]
MORE_KINDS = [
    (3, 1, s.Kind(6, "bfloat16", (), "int64", (2, 2))),
    (4, 3, s.Kind(150, "float32", (2, 251), "bool")),
    (3, 1, s.Kind(8, "float16", (3, 4), "int16", (2,), is_strided=True)),
    (2, 1, s.Kind(1, "int32", (3, 1, 2), "float64")),
    (3, 0, s.Kind(0)),
    (1, 0, s.Kind(4)),
    (4, None, s.Kind(9, "float32", (3, 4), "int32")),
]


@task("1.3", real=True)
@pytest.mark.parametrize(("n", "src", "kind"), KINDS, ids=str)
def test_every_rank_gets_its_rows(grade: Grade, n: int, src: int | None, kind: s.Kind) -> None:
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
        check(
            found["class"] == "tuple",
            f"rank {rank} of {n}: scatter_batch should return a tuple; it returned a "
            f"{found['class']}.",
        )
        for what, whole in batch.items():
            rows = _rows_of(kind.rows, n, rank)
            _check_part(
                found[what], whole[rows.start : rows.stop], f"rank {rank} of {n}: {what}", rows
            )
        check(
            rank != src or all(found["is_view"]),
            f"rank {rank} of {n} is the source: its rows should be views of the batch, but they "
            "are copies in other memory. Slices and tensor_split copy nothing.",
        )


def _rows_of(rows: int, n: int, rank: int) -> range:
    """The rows of a rank: 4 ranks share 10 rows as 3, 3, 2 and 2."""
    starts = [k * (rows // n) + min(k, rows % n) for k in (rank, rank + 1)]
    return range(*starts)


def _check_part(found: Any, expected: Any, here: str, rows: range) -> None:
    shape, dtype, device, numbers = found
    check(
        (shape, dtype, device) == (list(expected.shape), str(expected.dtype), "cpu"),
        f"{here} should be {expected.dtype} of shape {list(expected.shape)} on the CPU; they are "
        f"{dtype} of shape {shape} on {device}. 4 ranks share 10 rows as 3, 3, 2 and 2; every rank "
        "learns dtypes and shapes from the source.",
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
            f"the source should send {_messages(wanted)} to rank {rank} of {len(members)}, which "
            f"gets {counted(rows, 'row')} from it; it sends {_messages(got)}. "
            f"{_cause(got, wanted, kind, rows)}",
        )
    others = sorted({(e.rank, e.peer) for e in sends if e.rank != members[src]})
    check(
        not others,
        f"only the source should send, but other ranks sent messages too: {short(others)}, as "
        "(from, to).",
    )
    _check_header(run, src, members)


def _messages(num_bytes: Sequence[int]) -> str:
    text = " and ".join(f"{number:,}" for number in num_bytes[:4])
    more = f" and {len(num_bytes) - 4} more" if len(num_bytes) > 4 else ""
    return f"messages of {text}{more} bytes" if num_bytes else "nothing"


def _cause(got: Sequence[int], wanted: Sequence[int], kind: s.Kind, rows: int) -> str:
    if not wanted:
        return "Zero rows need no message, and neither do the rows that the source keeps."
    if len(got) > len(wanted) and sum(got) == sum(wanted):
        return "Send a rank's rows as one tensor: each message costs α."
    if len(got) == len(wanted) and sum(got) == sum(wanted) * kind.rows / rows:
        return "Send every row to one rank only."
    if len(got) == len(wanted):
        return "Send the rows in their own dtype."
    if not got:
        return "Was the whole batch broadcast? Send every row to one rank only."
    return (
        "Send images and labels as one message each, and the shapes to all ranks in one broadcast."
    )


def _check_header(run: Run, src: int, members: Sequence[int]) -> None:
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
    unwaited = run.trace.unwaited
    check(
        not unwaited,
        f"sends are still under way when scatter_batch returns:\n{chr(10).join(unwaited[:4])}\nThe "
        "network may still read the rows: wait for each send.",
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
    check_refused(run.results, f"{what} on the source")
    if grade.is_simulated:
        _check_traffic(run, s.Kind(0), 1, range(3))
    alone = grade.run(s.scatter_what_is_wrong, 1, what, 0)
    check_refused(alone.results, f"{what} on the source")


@task("1.3")
@pytest.mark.parametrize("is_text", [False, True], ids=["device", "text"])
def test_rows_arrive_on_the_device(grade: Grade, is_text: bool) -> None:
    n, src = 3, 1
    kind = s.Kind(7, seed=grade.random.randrange(10**6))
    for rank, found in enumerate(grade.run(s.scatter_on_device, n, kind, src, is_text).results):
        device, rows = found["asked_for"], _rows_of(kind.rows, n, rank)
        given = repr(device) if is_text else f"torch.device({device!r})"
        check(
            found["devices"] == [device] * 2,
            f"rank {rank} of {n}: with device={given}, images and labels should be on that device; "
            f"they are on {' and '.join(found['devices'])}.",
        )
        last = found["travelled"][-(2 * (n - 1) if rank == src else 2) :]
        check(
            {*last} == {device},
            f"rank {rank} of {n}: rows should be sent from {device} and received there; the "
            f"tensors were on {' and '.join(sorted({*last}))}. NCCL only sends tensors on GPUs.",
        )
        expected = [s.bytes_of(t[rows.start : rows.stop]) for t in kind.batch()]
        check(
            found["numbers"] == expected,
            f"rank {rank} of {n}: with device={given}, rows {[*rows]} should arrive, but other "
            "numbers arrived.",
        )


@task("1.3")
@pytest.mark.parametrize(("src", "rows"), [(1, 8), (2, 2), (None, 4)])
def test_scattering_inside_a_group(grade: Grade, src: int | None, rows: int) -> None:
    kind = s.Kind(rows, seed=grade.random.randrange(10**6))
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, s.scatter, kind, src), if_stuck=STUCK_IN_GROUP
    )
    _check_scattered(of_members(run), kind, src or 0)
    if grade.is_simulated:
        _check_traffic(run, kind, src or 0, MEMBERS)
    if src == 1:
        args = (s.scatter_what_is_wrong, "6 images and 5 labels", src)
        run = grade.run(inside_group, OUTER_WORLD_SIZE, *args, if_stuck=ONLY_SOURCE_RAISES)
        check_refused(of_members(run), "6 images and 5 labels on the source of a group")
