"""Correct programs: threads of a rank, and time limits on waits."""

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist
from catalogue import empty, me, received, reduced, returns, value

SECOND = timedelta(seconds=1)

# Threads


@returns([(6, 10)] * 4)
def a_group_of_its_own_for_a_thread() -> object:
    """A thread reduces on one group while the main thread reduces on another."""
    group, sums = dist.new_group(), list[float]()

    def reduce() -> None:
        x = value(me() + 1)
        dist.all_reduce(x, group=group)
        sums.append(x.item())

    thread = threading.Thread(target=reduce)
    thread.start()
    mine = reduced(me())
    thread.join()
    return mine, sums[0]


@returns([[0, 1, 4], [0, 1, 4]])
def a_saver_in_an_executor() -> object:
    """Results come from an executor that is never shut down."""
    saver = ThreadPoolExecutor(2)
    saved = [saver.submit(lambda i=i: i * i) for i in range(3)]
    dist.barrier()
    return [one.result() for one in saved]


@returns([[0, 1, 2, 3]] * 2)
def a_loader_behind_a_queue() -> object:
    """A thread loads batches ahead of time into a queue that has room for one."""
    batches: queue.Queue[int | None] = queue.Queue(1)

    def load() -> None:
        for batch in (0, 1, 2, 3, None):
            time.sleep(0.01)
            batches.put(batch)

    threading.Thread(target=load, daemon=True).start()
    seen = []
    while (batch := batches.get()) is not None:
        seen.append(batch)
        dist.barrier()
    return seen


@returns([1, 0])
def sends_in_one_thread_and_receives_in_another() -> object:
    """Head-to-head sends, which would deadlock in one thread, work in two."""
    thread = threading.Thread(target=dist.send, args=(value(me()), 1 - me()))
    thread.start()
    x = received(1 - me())
    thread.join()
    return x


@returns([None, 3])
def a_thread_that_outlives_its_rank() -> object:
    """Rank 0 returns while one of its threads still has something to send."""

    def send_late() -> None:
        time.sleep(1.0)
        dist.send(value(3), 1)

    if me() == 1:
        return received(0)
    threading.Thread(target=send_late).start()
    return None


@returns([[0, 1, 2]] * 2)
def waits_on_a_condition() -> object:
    """Three threads take turns, using a condition with a reentrant lock."""
    turn, seen = threading.Condition(), list[int]()

    def take(number: int) -> None:
        with turn:
            turn.wait_for(lambda: len(seen) == number)
            seen.append(number)
            turn.notify_all()

    threads = [threading.Thread(target=take, args=(number,)) for number in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    return seen


# Time limits


@returns(["late", "closed"])
def a_message_that_comes_too_late() -> object:
    """Rank 0 gives up after a second, which closes the connection."""
    try:
        if me() == 0:
            dist.irecv(empty(), 1).wait(SECOND)
        else:
            time.sleep(2)
            dist.send(value(1), 0)
    except RuntimeError as error:
        return "late" if "Timed out waiting 1000ms for recv" in str(error) else "closed"
    return "in time"


@returns(["late", "in time"])
def a_collective_that_goes_on() -> object:
    """Rank 0 gives up after a second, then waits again without a limit."""
    x, outcome = value(me()), "in time"
    if me() == 1:
        time.sleep(2)
    work = dist.all_reduce(x, async_op=True)
    try:
        work.wait(SECOND)
    except RuntimeError:
        outcome = "late"
        work.wait()
    assert x.item() == 1
    return outcome
