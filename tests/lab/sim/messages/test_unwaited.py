"""The trace, ``unwaited()`` and reports list the handles that a rank never waited for."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from programs import me

from distlab.sim import Options, simulate, unwaited


def sends_and_forgets() -> None:
    if me() == 0:
        dist.isend(torch.ones(4), 1)
    else:
        dist.recv(torch.zeros(4), 0)


def asks_too_early() -> None:
    if me() == 0:
        assert not dist.isend(torch.ones(4), 1).is_completed()
    dist.barrier()
    if me() == 1:
        dist.recv(torch.zeros(4), 0)


@pytest.mark.parametrize("program", [sends_and_forgets, asks_too_early])
def test_a_send_that_nobody_waited_for_is_listed_although_it_arrived(
    program: Callable[[], None],
) -> None:
    trace = simulate(program, 2).trace
    (line,) = trace.unwaited
    assert "rank 0  isend to rank 1, (4,) float32" in line
    assert "test_unwaited.py:" in line
    assert line.endswith(f"in {program.__name__}")
    assert trace.leftovers == []


def messages() -> tuple[dist.Work, dist.Work]:
    return dist.isend(torch.ones(4), 1 - me()), dist.irecv(torch.zeros(4), 1 - me())


def waits() -> None:
    for work in messages():
        work.wait()


def asks_until_they_are_done() -> None:
    for work in messages():
        while not work.is_completed():
            pass


def uses_a_future() -> None:
    dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()


def calls_that_block() -> None:
    dist.all_reduce(torch.ones(2))
    dist.barrier()


@pytest.mark.parametrize(
    "program", [waits, asks_until_they_are_done, uses_a_future, calls_that_block]
)
def test_a_handle_that_was_waited_for_is_not_listed(program: Callable[[], None]) -> None:
    assert simulate(program, 2, options=Options(eager_bytes=16)).trace.unwaited == []


def forgets_all_kinds() -> None:
    send = dist.P2POp(dist.isend, torch.ones(4), 1 - me())
    recv = dist.P2POp(dist.irecv, torch.zeros(4), 1 - me())
    dist.batch_isend_irecv([send, recv])
    for _ in range(3):
        dist.all_reduce(torch.ones(2), async_op=True)
    dist.barrier()


def test_batches_and_collectives_are_listed_by_rank() -> None:
    lines = simulate(forgets_all_kinds, 2).trace.unwaited
    assert [line.split()[1] for line in lines] == ["0"] * 5 + ["1"] * 5
    assert "isend to rank 1, (4,) float32" in lines[0]
    assert "irecv from rank 1, (4,) float32" in lines[1]
    assert "all_reduce (call 1 of ranks 0 and 1), (2,) float32" in lines[2]


def asks_which() -> list[list[str]]:
    work = dist.isend(torch.ones(4), 1 - me())
    dist.recv(torch.zeros(4), 1 - me())
    before = unwaited()
    work.wait()
    return [before, unwaited()]


def test_a_rank_can_ask_for_its_own() -> None:
    for rank, (before, after) in enumerate(simulate(asks_which, 2).results):
        (line,) = before
        assert line.startswith(f"rank {rank}  isend to rank {1 - rank}, (4,) float32")
        assert after == []


def waits_twice() -> None:
    x = torch.zeros(1)
    work = dist.irecv(x, 0) if dist.get_rank() else dist.isend(x, 1)
    work.wait()
    if dist.get_rank():
        work.wait()


def polls_before_it_waits() -> None:
    x = torch.zeros(1)
    work = dist.irecv(x, 0) if dist.get_rank() else dist.isend(x, 1)
    while not work.is_completed():
        pass
    work.wait()
    again = dist.all_reduce(x, async_op=True)
    again.wait()
    again.wait()


def test_a_second_wait_for_a_message_is_named() -> None:
    [row] = simulate(waits_twice, 2).trace.waited_twice
    assert "rank 1  irecv from rank 0" in row
    assert simulate(polls_before_it_waits, 2).trace.waited_twice == []
