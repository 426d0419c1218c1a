"""Handles that a rank never waited for: listed by the trace, by ``unwaited()`` and in reports."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from programs import me

from distlab.sim import Deadlock, Faults, Mismatch, Options, simulate, unwaited


def sends_and_forgets() -> None:
    if me() == 0:
        dist.isend(torch.ones(4), 1)
    else:
        dist.recv(torch.zeros(4), 0)


def test_a_send_that_nobody_waited_for_is_listed_although_it_arrived() -> None:
    trace = simulate(sends_and_forgets, 2).trace
    (line,) = trace.unwaited
    assert "rank 0  isend to rank 1, (4,) float32" in line
    assert "test_unwaited.py:" in line
    assert line.endswith("in sends_and_forgets")
    assert trace.leftovers == []


def waits(how: str) -> None:
    for work in (dist.isend(torch.ones(4), 1 - me()), dist.irecv(torch.zeros(4), 1 - me())):
        if how == "wait":
            work.wait()
        elif how == "is_completed":
            while not work.is_completed():
                pass
        else:
            work.get_future()


@pytest.mark.parametrize("how", ["wait", "is_completed"])
def test_a_handle_that_was_waited_for_is_not_listed(how: str) -> None:
    assert simulate(waits, 2, how, options=Options(eager_bytes=16)).trace.unwaited == []


def uses_a_future() -> None:
    dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()


def calls_that_block() -> None:
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    if me() == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.zeros(2), 0)


@pytest.mark.parametrize("program", [uses_a_future, calls_that_block])
def test_futures_and_blocking_calls_leave_nothing(program) -> None:  # type: ignore[no-untyped-def]
    assert simulate(program, 2).trace.unwaited == []


def asks_too_early() -> None:
    if me() == 0:
        assert not dist.isend(torch.ones(4), 1).is_completed()
    dist.barrier()
    if me() == 1:
        dist.recv(torch.zeros(4), 0)


def test_to_ask_and_not_to_wait_until_it_is_done_is_not_enough_and_neither_is_a_barrier() -> None:
    (line,) = simulate(asks_too_early, 2).trace.unwaited
    assert "rank 0  isend" in line


def forgets_all_kinds() -> None:
    send = dist.P2POp(dist.isend, torch.ones(4), 1 - me())
    recv = dist.P2POp(dist.irecv, torch.zeros(4), 1 - me())
    dist.batch_isend_irecv([send, recv])
    for _ in range(3):
        dist.all_reduce(torch.ones(2), async_op=True)
    dist.barrier()


def test_batches_and_collectives_are_listed_by_rank_and_equal_ones_counted() -> None:
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
    results = simulate(asks_which, 2).results
    for rank, (before, after) in enumerate(results):
        (line,) = before
        assert line.split() == [
            *("rank", str(rank), "isend", "to", "rank", f"{1 - rank},", "(4,)", "float32"),
            *line.split()[-3:],
        ]
        assert after == []


def drops_a_large_tensor() -> bool:
    x = torch.ones(1000)
    alive = weakref.ref(x.untyped_storage())
    if me() == 0:
        dist.isend(x, 1)
    else:
        dist.recv(x, 0)
    dist.barrier()
    del x
    gc.collect()
    return alive() is None


def test_the_list_keeps_no_tensor_alive() -> None:
    assert simulate(drops_a_large_tensor, 2).results == [True, True]


def dies_with_a_handle() -> None:
    if me() == 0:
        dist.isend(torch.ones(4), 1)
        dist.recv(torch.zeros(4), 1)
    else:
        dist.recv(torch.zeros(4), 0)


def test_a_killed_rank_had_no_time_to_wait() -> None:
    faults = Faults(kill_ranks={0: 1.0})
    assert simulate(dies_with_a_handle, 2, options=Options(faults=faults)).trace.unwaited == []


def returns_with_a_handle() -> None:
    if me() == 1:
        exchange_badly()
    else:
        dist.recv(torch.zeros(4), 1)
        dist.recv(torch.zeros(4), 1)


def exchange_badly() -> None:
    dist.isend(torch.ones(4), 0)


def test_a_deadlock_says_what_the_rank_that_ended_had_not_waited_for() -> None:
    with pytest.raises(Deadlock) as caught:
        simulate(returns_with_a_handle, 2)
    lines = str(caught.value).splitlines()
    (line,) = [line for line in lines if "without waiting" in line]
    assert line.startswith(
        "Rank 1 returned without waiting for its isend to rank 0, (4,) float32 (test_unwaited.py:"
    )
    assert line.endswith("in exchange_badly).")


def waits_in_good_order() -> None:
    work = dist.isend(torch.ones(4), 1 - me())
    dist.recv(torch.zeros(3), 1 - me())
    work.wait()


def test_a_rank_that_has_not_returned_may_still_wait() -> None:
    with pytest.raises(Mismatch) as caught:
        simulate(waits_in_good_order, 2)
    assert "without waiting" not in str(caught.value)
