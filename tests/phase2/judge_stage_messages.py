"""Judges task 2.9: any tensors arrive at a rank that knows nothing about them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from judging.checks import check_no_collective, of_members, short, uneven
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import stages as b

STUCK = (
    "Every rank calls send_tensors first, and recv_tensors before it waits for the works: "
    "send_tensors must not wait for the receiver."
)
HEADER_BYTES, MORE_BYTES = 1024, 256  # of up to four tensors, for each more
HEADER = 2  # messages at most


@task("2.9", real=True)
@pytest.mark.parametrize("n", [2, 3])
def test_any_tensors_arrive(grade: Grade, n: int) -> None:
    run = grade.run(b.pass_around, n, options=uneven(grade.random, n), if_stuck=STUCK)
    _check_arrived(run.results)
    if grade.is_simulated:
        check_no_collective(run, "tensors should travel in messages")
        _check_waited(run)


def _check_arrived(by_rank: Sequence[Any]) -> None:
    for rank, result in enumerate(by_rank):
        check(all(result["unchanged"]), f"rank {rank}: send_tensors changed what it was given.")
        src = (rank - 1) % len(by_rank)
        for wanted, got in zip(b.told_of(src), result["arrived"], strict=True):
            _check_list(f"rank {rank} of {len(by_rank)}, from rank {src}", wanted, got)


CAUSES = {
    "dtype": "The header tells the dtype: allocate what comes in it.",
    "shape": "The header tells the shape, also () and (0, 3).",
    "requires_grad": "The header tells whether a gradient is required: requires_grad_ sets it.",
    "values": "A tensor that is not contiguous has to be copied before it is sent, and every "
    "message is received into a tensor of its own size, in the order of the sends.",
    "leaf": "What arrives begins a new graph.",
}


def _check_list(here: str, wanted: list[Any], got: list[Any]) -> None:
    kinds = [f"{x['dtype']} {tuple(x['shape'])}" for x in wanted]
    check(
        len(wanted) == len(got),
        f"{here}: of the tensors that were sent, {short(kinds)}, {len(got)} arrived.",
    )
    for kind, expected, found in zip(kinds, wanted, got, strict=True):
        for name, cause in CAUSES.items():
            check(
                expected[name] == found[name],
                f"{here}: of a tensor that was sent as {kind}, {name} should be "
                f"{short(expected[name])}, and is {short(found[name])}. {cause}",
            )


def _check_waited(run: Run) -> None:
    left = run.trace.unwaited if run.trace else []
    check(
        not left,
        "send_tensors should return the works of all its messages, the header too, and "
        "recv_tensors should have everything on return. Nobody could wait for, or has waited for: "
        f"{'; '.join(' '.join(row.split()) for row in left[:2])}",
    )


@task("2.9")
def test_a_tensor_is_a_message(grade: Grade) -> None:
    run = grade.run(b.send_one_way, 2)
    check_no_collective(run, "tensors should travel in messages")
    sent = [[x.nbytes for x in tensors] for tensors in b.lists_of(0)]
    check_messages(f"rank 0 to rank 1, in {len(sent)} calls", sizes_sent(run, 0, 1), sent)


def sizes_sent(run: Run, src: int, dst: int) -> list[int]:
    """Bytes of the messages from one rank to another, in the order of their numbers.

    They may arrive in another order: a short one overtakes a long one.
    """
    pairs = run.trace.pairs() if run.trace else []
    sends = [send for send, recv in pairs if (send.rank, recv.rank) == (src, dst)]
    return [send.num_bytes for send in sorted(sends, key=lambda send: send.message)]


def check_messages(here: str, found: Sequence[int], sent: Sequence[Sequence[int]]) -> None:
    """Check the messages of several ``send_tensors`` from one rank to another.

    Args:
        here: which ranks, for the message.
        found: bytes of all messages, in order.
        sent: bytes of the tensors of each call, in order.
    """
    expected = Counter(size for sizes in sent for size in sizes)
    missing, more = expected - Counter(found), Counter(found) - expected
    check(
        not missing,
        f"{here}: tensors of {short(sorted(expected.elements()))} bytes should be sent, each in a "
        f"message of its own and in its own dtype; messages of {short(sorted(missing))} bytes are "
        f"missing. There are messages of {short(sorted(found))} bytes.",
    )
    allowed = sum(HEADER_BYTES + MORE_BYTES * max(0, len(sizes) - 4) for sizes in sent)
    check(
        more.total() <= HEADER * len(sent) and sum(more.elements()) <= allowed,
        f"{here}: tensors of {short(sorted(expected.elements()))} bytes should be sent, each once "
        f"and only if it is needed there, after a header of at most {HEADER} messages, with at "
        f"most {allowed:,} bytes in all headers. Yours sends besides these tensors messages of "
        f"{short(sorted(more.elements()))} bytes.",
    )
    last = sent[-1][-1:] if sent else []
    check(
        found[-1:] == last or not last,
        f"{here}: the last message should be a tensor of {short(last)} bytes; yours has "
        f"{short(found[-1:])} bytes. Send no header where no tensor follows.",
    )


@task("2.9")
def test_messages_inside_a_group(grade: Grade) -> None:
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.pass_around),
        if_stuck=f"{STUCK} {STUCK_IN_GROUP}",
    )
    check(len(of_members(run)) == len(MEMBERS), "a rank of the group returned nothing.")
    _check_arrived(of_members(run))
