"""Broken programs whose reports have notes on exceptions, threads, groups, or other ranks."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from catalogue import (
    ENDED,
    MISSING,
    THREAD,
    deadlock,
    me,
    rank_error,
    value,
)
from torch import Tensor, nn

# Caught exceptions


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
    """Converting the exception to text raises another one."""
    try:
        if me() == 2:
            raise Unprintable
        dist.all_reduce(value(1))
    except Unprintable:
        dist.send(value(1), 0)


# Threads


@deadlock(1, THREAD, (0,), "waits for an event of its own (20 times) broken_notes.py:")
def many_threads_wait_at_one_line() -> None:
    """The report merges the rows of identical threads and shows how many there are."""
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
    """Rank 0 has read its task's exception, so the report does not mention it."""
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(save)
        if me() == 0:
            assert isinstance(task.exception(), OSError)


@deadlock(2, ENDED, (0,), never=("daemon",))
def leaves_a_sleeper_behind() -> None:
    """Rank 1 has a daemon thread, which ends with the rank and is not to blame."""
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


@deadlock(2, ENDED, (1,), "on group 'metrics' for rank 1")
def group_with_a_description() -> None:
    """The report refers to a group by its description."""
    meets_alone(dist.new_group(group_desc="metrics"))


# Other ranks at the time of an error


@rank_error(2, "RuntimeError", (0,), "rank 1 running broken_notes.py:")
def is_late_for_a_group_with_a_limit() -> None:
    """Rank 1 is still computing when rank 0's time limit expires."""
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
    """Rank 1 reads a tensor that has not arrived."""
    x = value(0)
    if me() == 1:
        dist.irecv(x, 0)
        assert x.item() == 1
    dist.barrier()


class AllFailed(BaseException):
    """An error like torch's CheckpointException, whose text holds the tracebacks of all ranks."""

    def __str__(self) -> str:
        frame = f'  File "{torch.__file__}", line 1, in f\n    f()\n'
        one = f"Traceback (most recent call last): (RANK 0)\n{frame}"
        return f"ranks: [0, 1]\n{one}RuntimeError: no key v\n{one}RuntimeError: no key v"


@rank_error(
    2,
    "AllFailed",
    (),
    "AllFailed: ranks: [0, 1] RuntimeError: no key v",
    never=("in f", "(RANK 0)"),
)
def raises_the_tracebacks_of_all_ranks() -> None:
    """The report shows the message without the tracebacks."""
    raise AllFailed


@rank_error(
    2,
    "ValueError",
    (),
    "cannot shard Sequential( (0): Identity() (1): Sequential( (0): Identity() ) )",
)
def prints_a_model() -> None:
    """Lines of a message that look alike, or a little like frames, stay."""
    raise ValueError(f"cannot shard {nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity()))}")


@rank_error(
    2,
    "RuntimeError",
    (),
    "NameError: name 'size' is not defined At: ",
    "): halve",
    never=("simulation.py", "scheduler.py", "futures"),
)
def fails_in_a_callback() -> None:
    """Torch's message holds the stack of the callback, of which the program's frames are shown."""

    def halve(summed: torch.futures.Future[list[Tensor]]) -> Tensor:
        return summed.value()[0] / size  # type: ignore[name-defined]  # noqa: F821

    work = dist.all_reduce(value(0), async_op=True)
    work.wait()
    work.get_future().then(halve).wait()
