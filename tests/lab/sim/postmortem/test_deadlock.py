"""Verdicts on deadlocks are exact and in plain English, for few ranks and for many."""

import pickle
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlab.process_group.call import Form
from distlab.sim import Deadlock, Mismatch
from distlab.sim.messages.meetings import Attendance, Meeting
from distlab.sim.messages.message import Message
from distlab.sim.messages.pending import ANY_SOURCE, Pending
from distlab.sim.messages.store import KeyWait
from distlab.sim.postmortem import deadlock
from distlab.sim.postmortem.standstill import History, Standstill

SCREEN_LINES = 24
SITE = ("/home/me/ring.py", 41, "exchange")
FORM = Form(torch.Size([4]), torch.float32)


def explain(blocked: dict[int, Pending], **others: Any) -> Deadlock:
    return deadlock.explain(Standstill(blocked, **others))


def hand_made(kind: type[Any], rank: int, name: str, group: Sequence[int], **others: Any) -> Any:
    """Make an operation that belongs to no world."""
    wait = kind.__new__(kind)
    call = {"site": SITE, "is_by_torch": False, "maker": ""}
    fields = {"rank": rank, "name": name, "group": tuple(group), **call, **others}
    fields |= {"waiters": (), "is_done": False}
    for field, value in fields.items():
        setattr(wait, field, value)
    return wait


def message(name: str, rank: int, peer: int, tag: int = 0, size: int = 4, **others: Any) -> Message:
    defaults = {"group": range(size), "clock": SimpleNamespace(num_ranks=size)}
    made: Message = hand_made(
        Message,
        rank,
        name,
        peer=peer,
        tag=tag,
        form=FORM,
        turn=None,
        key=None,
        mailbox=SimpleNamespace(why_closed=lambda _: "", taken_at=lambda _: None),
        **{**defaults, **others},
    )
    return made


def send(rank: int, peer: int, **others: Any) -> Message:
    return message("send", rank, peer, **others)


def recv(rank: int, peer: int, **others: Any) -> Message:
    return message("recv", rank, peer, **others)


def collective(present: Iterable[int], group: Sequence[int], number: int = 0) -> dict[int, Pending]:
    """Return the all_reduce calls of the ranks ``present``; they wait for the rest of the group."""
    world: Any = SimpleNamespace(clock=None)
    meeting = Meeting(world, "0", tuple(group), number)
    for rank in present:
        meeting.attendances[rank] = hand_made(
            Attendance,
            rank,
            "all_reduce",
            group,
            clock=SimpleNamespace(num_ranks=8),
            forms=[FORM],
            meeting=meeting,
            caller=("", 0, ""),
        )
    return dict(meeting.attendances)


def waits(*waits: Message | KeyWait) -> dict[int, Pending]:
    return {wait.rank: wait for wait in waits}


def first_line(report: Deadlock) -> str:
    return str(report).splitlines()[0]


def advice(report: Deadlock) -> str:
    assert str(report).endswith(f"\n{report.advice}")
    return report.advice.splitlines()[-1]


# Kinds


def test_the_collective_with_the_fewest_absent_ranks_is_the_one_to_look_at() -> None:
    blocked = collective([0], range(3)) | collective([1], [1, 2]) | waits(recv(2, 0))
    report = explain(blocked)
    assert (report.kind, report.ranks) == ("missing rank", (2,))
    assert "rank 1 waits in all_reduce (call 1 of ranks 1 and 2) for rank 2" in first_line(report)


# Hints


@pytest.mark.parametrize(
    ("blocked", "hint"),
    [
        (
            [send(0, 1, tag=7), recv(1, ANY_SOURCE)],
            "Rank 0 sends to rank 1 with tag 7, but rank 1 receives with tag 0: give both the same "
            "tag, or, if both tags are used, use them in the same order on both ranks.",
        ),
        (
            [send(0, 1), recv(1, 0)],
            "Rank 0 sends to rank 1 on one group, but rank 1 receives on another group of the same "
            "ranks: give both the same group.",
        ),
    ],
)
def test_what_keeps_a_send_from_its_recv(blocked: list[Message], hint: str) -> None:
    assert advice(explain(waits(*blocked), ended=[2, 3], unmatched=blocked)) == hint


@pytest.mark.parametrize(
    ("posted", "question"),
    [
        (
            [send(0, 1), recv(1, 2)],
            "Rank 0 sends to rank 1, but rank 1 receives from rank 2: is one of the peers wrong?",
        ),
        (
            [send(0, 2), recv(1, 0)],
            "Rank 1 receives from rank 0, but rank 0 sends to rank 2: is one of the peers wrong?",
        ),
    ],
)
def test_a_wrong_peer_is_asked_about(posted: list[Message], question: str) -> None:
    report = explain(waits(*posted), ended=[2], unmatched=posted)
    assert report.kind == "peer ended"
    assert advice(report) == f"Or else: {question}"


def test_a_peer_that_was_right_before_is_not_asked_about() -> None:
    posted = [recv(0, 2), send(1, 0)]
    for arrived, is_asked in (({(1, 0): 3}, True), ({(2, 0): 1}, False)):
        history = History(arrived=arrived)
        report = explain(waits(*posted), ended=[2], unmatched=posted, history=history)
        assert ("is one of the peers wrong?" in str(report)) == is_asked


def test_peers_are_asked_about_if_all_ranks_of_a_cycle_have_posted_a_send() -> None:
    recvs = [recv(rank, (rank - 1) % 3) for rank in range(3)]
    sends = [send(rank, (rank - 1) % 3) for rank in range(3)]
    history = History(arrived={((rank - 1) % 3, rank): 1 for rank in range(3)})
    for posted, is_asked in ((sends, True), (sends[:1], False)):
        report = explain(waits(*recvs), unmatched=[*recvs, *posted], history=history)
        assert advice(report).endswith("is one of the peers wrong?") == is_asked
        assert ("none has a send under way" in str(report)) != is_asked


def test_peers_are_not_asked_about_where_another_thread_may_receive() -> None:
    posted = [recv(0, 1), recv(1, 2), send(2, 0)]
    for beside, is_asked in (([], True), ([recv(0, 2)], False)):
        report = explain(waits(*posted), unmatched=posted, beside=beside)
        assert ("is one of the peers wrong?" in str(report)) == is_asked


# Rows


def test_calls_are_there_for_programs_to_read() -> None:
    report = explain(collective([2], range(3)) | waits(recv(0, 2), recv(1, 2)))
    assert [(call.rank, call.operation, call.waits_for) for call in report.calls] == [
        (0, "recv", (2,)),
        (1, "recv", (2,)),
        (2, "all_reduce", (0, 1)),
    ]


def test_errors_survive_a_pickle() -> None:
    report = explain(waits(recv(0, 1), recv(1, 0)))
    copy = pickle.loads(pickle.dumps(report))
    assert (str(copy), copy.ranks, copy.kind) == (str(report), report.ranks, report.kind)
    assert copy.calls == report.calls
    other = pickle.loads(pickle.dumps(Mismatch("sizes", (0, 1), "shape or dtype mismatch")))
    assert (other.ranks, other.kind) == ((0, 1), "shape or dtype mismatch")


def test_of_too_many_rows_those_to_blame_are_kept() -> None:
    victims = [recv(rank, rank - 1, tag=rank, size=64) for rank in range(2, 62)]
    cycle = [
        recv(62, 63, size=64),
        recv(63, 62, size=64),
        recv(0, 62, size=64),
        recv(1, 62, size=64),
    ]
    report = str(explain(waits(*victims, *cycle)))
    assert "rank 62 recv from rank 63" in " ".join(report.split())
    assert "not shown" in report
    assert len(report.splitlines()) <= SCREEN_LINES
