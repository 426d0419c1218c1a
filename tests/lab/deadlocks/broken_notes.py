"""Broken programs whose report has notes: exceptions, threads, groups, and the other ranks."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from catalogue import (
    ENDED,
    MISSING,
    OPERATION,
    SHAPE,
    THREAD,
    deadlock,
    me,
    mismatch,
    rank_error,
    value,
)

# Exceptions that are caught


@mismatch(3, SHAPE, (2,), "can hide an error: did a rank come through it")
def skips_a_round_of_other_sizes() -> None:
    """Rank 2 leaves out a round, and each round has tensors of another size."""
    for step in range(3):
        try:
            if (step, me()) == (1, 2):
                raise ValueError("bad sample")
            dist.all_reduce(torch.ones(step + 1))
        except ValueError:
            pass


@deadlock(3, ENDED, (0,), never=("broadcast raised",))
def is_refused_long_before() -> None:
    """A refusal that all ranks have got does not explain what happens later."""
    with suppress(ValueError, RuntimeError):
        dist.broadcast(torch.ones(2, 2).T, 0)
    for _ in range(3 if me() else 2):
        dist.barrier()


@mismatch(3, OPERATION, (1,), "can hide an error: did a rank come through it, and so leave out")
def has_a_barrier_in_its_finally() -> None:
    """Rank 1 leaves its loop early, and comes to the barrier of all."""
    try:
        for step in range(3):
            if (step, me()) == (1, 1):
                raise ValueError("bad sample")
            dist.all_reduce(value(1))
    except ValueError:
        return
    finally:
        dist.barrier()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


@deadlock(
    3,
    MISSING,
    (2,),
    "an except deals with Unprintable: it cannot be printed, broken_notes.py:",
    if_buffered=ENDED,
)
def handles_what_cannot_be_printed() -> None:
    """The text of the exception raises an exception."""
    try:
        if me() == 2:
            raise Unprintable
        dist.all_reduce(value(1))
    except Unprintable:
        dist.send(value(1), 0)


# Threads


@deadlock(
    3,
    THREAD,
    (0, 1, 2),
    "deadlock (thread wait): on ranks 0 and 1 thread 'saver' waits for an event of its own, "
    "and the main thread waits for the end of thread 'saver' and also (thread wait): rank 2 "
    "waits for a semaphore of its own, which is at 0, and no thread of it can go on",
    never=("waits for an event of its own in given",),
)
def threads_of_two_ranks_wait_alike() -> None:
    """Two ranks make the same mistake, a third another one."""
    if me() == 2:
        threading.Semaphore(0).acquire()
    thread = threading.Thread(target=threading.Event().wait, name="saver")
    thread.start()
    thread.join()


@deadlock(
    1,
    THREAD,
    (0,),
    "thread 'saver' waits for a lock of its own, held by the main thread",
    "Release the lock before waiting for a thread that needs it.",
)
def joins_with_a_lock() -> None:
    """The main thread holds the lock that its thread needs to end."""
    lock = threading.Lock()
    with lock:
        thread = threading.Thread(target=lock.acquire, name="saver")
        thread.start()
        thread.join()


@deadlock(1, THREAD, (0,), "waits for an event of its own (20 times) broken_notes.py:")
def many_threads_wait_at_one_line() -> None:
    """Rows that are equal are counted."""
    never = threading.Event()
    for _ in range(20):
        threading.Thread(target=never.wait).start()
    never.wait()


@deadlock(
    2,
    THREAD,
    (0, 1),
    "thread 'w' waits for a lock of its own, held by the main thread",
    never=("notify",),
)
def notifies_and_keeps_the_lock() -> None:
    """A notified thread needs the condition's lock, which the notifier holds while it joins."""
    condition = threading.Condition()

    def wait() -> None:
        with condition:
            condition.wait()

    thread = threading.Thread(target=wait, name="w")
    thread.start()
    time.sleep(1)
    with condition:
        condition.notify()
        thread.join()


def save() -> None:
    if me() == 0:
        raise OSError("disk full")
    dist.barrier()


@deadlock(2, ENDED, (0,), never=("disk full",))
def knows_the_error_of_its_task() -> None:
    """Rank 0 has asked for the exception of its task."""
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(save)
        if me() == 0:
            assert isinstance(task.exception(), OSError)


@deadlock(2, ENDED, (0,), never=("disk full",))
def catches_the_error_of_its_task() -> None:
    """Rank 0 has caught the exception of its task."""
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(save)
        if me() == 0:
            with suppress(OSError):
                task.result()


@deadlock(2, ENDED, (1,), never=("what ran",))
def asks_for_the_first_error_of_a_map() -> None:
    """All results of a map have the error for which the rank has asked."""
    with ThreadPoolExecutor(1) as pool, suppress(ValueError):
        list(pool.map(int, "xyz"))
    if me() == 0:
        dist.barrier()


@deadlock(2, ENDED, (0,), never=("daemon",))
def leaves_a_sleeper_behind() -> None:
    """Rank 1 has a thread that ends with it, and is not to blame."""
    if me() == 1:
        threading.Thread(target=lambda: time.sleep(9), daemon=True).start()
        time.sleep(0.1)
    dist.all_reduce(value(1))
    if me() == 1:
        dist.recv(value(1), 0)


# Groups


def meets_alone(group: dist.ProcessGroup) -> None:
    if me() == 0:
        dist.barrier(group)


@deadlock(2, ENDED, (1,), "waits in barrier (call 1 of ranks 0 and 1) for rank 1")
def two_groups_of_which_one_is_used() -> None:
    """A group has a number only where another one of the same ranks is in use."""
    meets_alone([dist.new_group(), dist.new_group()][1])


@deadlock(2, ENDED, (1,), "on group 'metrics' for rank 1")
def group_with_a_description() -> None:
    """A group is called what the program calls it."""
    meets_alone(dist.new_group(group_desc="metrics"))


# The other ranks of an error


@rank_error(
    4,
    "ValueError",
    (2,),
    "The other ranks: rank 0 recv from rank 2, (1,) float32 broken_notes.py:",
    "rank 1 returned without communicating broken_notes.py:",
    "rank 3 running",
)
def others_wait_return_and_run() -> None:
    """Rank 2 fails, while one rank waits for it, one has returned, and one has not begun."""
    if me() == 0:
        dist.recv(value(0), 2)
    elif me() == 2:
        raise ValueError("bad sample")
    elif me() == 3:
        time.sleep(1)


@rank_error(
    3,
    "RuntimeError",
    (0,),
    "Timed out waiting 1000ms",
    "rank 1 send to rank 0, (1,) float32",
    "rank 2 returned without communicating",
)
def waits_for_the_wrong_rank_for_a_second() -> None:
    """A limit passes on rank 0; rank 1 has sent what it does not ask for."""
    if me() == 0:
        dist.irecv(value(0), 2).wait(timedelta(seconds=1))
    elif me() == 1:
        dist.send(value(1), 0)


@rank_error(2, "RuntimeError", (0,), "rank 1 running broken_notes.py:")
def is_late_for_a_group_with_a_limit() -> None:
    """Rank 1 computes while the limit of rank 0 passes."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if me() == 1:
        time.sleep(3)
    dist.all_reduce(value(1), group=group)


@rank_error(
    2,
    "AssertionError",
    (1,),
    "Rank 1 had not waited for its irecv from rank 0, (1,) float32 (broken_notes.py:",
)
def checks_before_it_waits() -> None:
    """Rank 1 looks at a tensor that has not arrived."""
    x = value(0)
    if me() == 1:
        dist.irecv(x, 0)
        assert x.item() == 1
    dist.barrier()


class AllFailed(BaseException):
    """An error like torch's CheckpointException, whose text has the tracebacks of all ranks."""

    def __str__(self) -> str:
        one = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\n'
        return f"ranks: [0, 1]\n{one}RuntimeError: no key v\n{one}RuntimeError: no key v"


@rank_error(
    2,
    "AllFailed",
    (),
    "AllFailed: ranks: [0, 1] RuntimeError: no key v",
    never=("a.py",),
)
def raises_the_tracebacks_of_all_ranks() -> None:
    """The message is shown without them."""
    raise AllFailed
