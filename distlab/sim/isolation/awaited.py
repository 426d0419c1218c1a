"""Descriptions of what threads wait for, read from the standard library's frames on their stacks.

Events, queues, semaphores and futures are all built on locks. When a lock blocks a thread, the
calling frames show which of these the thread is using, and hold the object, so that its state can
be reported.
"""

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import _base as futures
from concurrent.futures import thread as pools
from types import CodeType, FrameType
from typing import Any, TypeAlias

from distlab.sim.engine.scheduler import Strand
from distlab.sim.messages.thread_wait import Awaited, thread_name

Describe: TypeAlias = Callable[[Any, Strand], Awaited]  # (the method's self, the waiting strand)
_MODULES = tuple(module.__name__ for module in (threading, queue, futures, pools))
RESULT = Awaited(
    "the result of a task of its own", "Does that task wait for this thread, or for a free worker?"
)


def of_lock(frame: FrameType | None, holder: Strand | None, me: Strand) -> Awaited:
    """Describe what a thread waits for when a lock blocks it.

    Args:
        frame: Frame that called the lock's ``acquire``.
        holder: Strand that holds the lock, or None if it is unknown.
        me: The waiting strand.
    """
    if frame and _is_in_the_way(frame):
        return _lock(holder, me)
    description: Awaited | None = None
    while frame and frame.f_globals.get("__name__") in _MODULES and frame.f_code is not _RUN:
        if describe := _MADE_OF_LOCKS.get(frame.f_code):
            owner = frame.f_locals.get("self")
            description = (
                Awaited(describe[0].format(owner), describe[1])
                if isinstance(describe, tuple)
                else describe(owner, me)
            )
        frame = frame.f_back
    return description or _lock(holder, me)


def _is_in_the_way(frame: FrameType) -> bool:
    """Return whether the thread waits for a condition variable's lock, not for a notification."""
    outer = frame.f_back if frame.f_code is _ACQUIRE_AGAIN else frame
    return outer is not None and (
        outer.f_code is _ENTER or outer.f_code.co_name == "_acquire_restore"
    )


def end_of(thread: Strand) -> Awaited:
    """Describe a wait for the end of another thread."""
    advice = "That thread cannot end: see what it waits for."
    return Awaited(f"the end of thread {thread.name!r}", advice, thread)


def sleeps(_: Strand) -> Awaited:
    """Describe the wait of a thread that does nothing but sleep."""
    return Awaited(
        "something, with only sleeps in between",
        "No rank will do anything any more. Only a process outside the simulation could still "
        "change the file, flag or answer that is looked for between the sleeps: wait for that "
        "process with wait() or join(), because sleeps take only virtual time.",
    )


def asyncio_task(_: Strand) -> Awaited:
    """Describe the wait of an event loop of which no task can go on."""
    return Awaited(
        "a task of asyncio",
        "Which task should set the future or event that the others await, and does it run at all?",
    )


def _lock(holder: Strand | None, me: Strand) -> Awaited:
    if holder is None:
        return Awaited(
            "a lock of its own",
            "Is a release() missing, or does the thread that has it wait for something else?",
        )
    if holder is me:
        advice = (
            "Is a release() missing? A thread can take a Lock only once; a threading.RLock it can "
            "take again."
        )
        return Awaited("a lock of its own, which it holds itself", advice)
    name = thread_name(holder)
    if holder.has_ended:
        advice = f"Is a release() missing in {name}? `with lock:` releases it in any case."
        return Awaited(f"a lock of its own, which {name} still held when it ended", advice)
    advice = "The lock is not released: see what the thread that holds it waits for."
    return Awaited(f"a lock of its own, held by {name}", advice, holder, is_lock=True)


def _room(full: Any, me: Strand) -> Awaited:
    return Awaited(
        f"room in a queue of its own, which is full ({full._qsize()} of {full.maxsize})",
        "Is a get() missing? Or does the thread that should take items out wait for something else "
        "first, or end?",
    )


def _done(worked_on: Any, me: Strand) -> Awaited:
    queued, taken = worked_on._qsize(), worked_on.unfinished_tasks - worked_on._qsize()
    is_taken = "Is a task_done() missing after one of the get()?"
    return Awaited(
        f"the end of the work on a queue of its own ({queued} items still in it, {taken} without "
        "task_done())",
        is_taken if taken else "Is a get() missing, or does the thread end that takes items out?",
    )


def _result(future: Any, me: Strand) -> Awaited:
    workers: list[Strand] = []  # threads of the pool in which the task is queued
    for strand, item, tasks in _workers(me):
        if item is not None and item.future is future:
            text = f"the result of a task in {thread_name(strand)}"
            return RESULT._replace(text=text, by=strand)
        if any(task is not None and task.future is future for task in tasks):
            workers.append(strand)
    if not workers:
        return RESULT
    advice = (
        "A task must not wait for another one of the same pool: call that one itself, or give the "
        "pool more threads."
        if me in workers
        else "See what the threads of the pool wait for."
    )
    return Awaited(
        "the result of a task that has not started, because no thread of its pool is free (0 of "
        f"{len(workers)})",
        advice,
    )


def _workers(me: Strand) -> Iterator[tuple[Strand, Any, list[Any]]]:
    """Yield a rank's pool threads, each with its current task and the tasks queued in its pool."""
    frames = sys._current_frames()
    for strand in me.rank.strands:
        frame, item = frames.get(strand.ident), None
        while frame:
            if frame.f_code is _RUN:
                item = frame.f_locals["self"]
            elif frame.f_code is _WORK:
                queued = getattr(frame.f_locals["work_queue"], "_queue", ())
                yield strand, item, [*queued]
            frame = frame.f_back


_EVENT = "an event of its own", "Is its set() missing, or does the thread end that sets it?"
_CONDITION = "a condition of its own", "Is a notify() missing, or was it too early?"
_SEMAPHORE = (
    "a semaphore of its own, which is at {0._value}",
    "Is a release() missing for one of the acquire()?",
)
_BARRIER = (
    "other threads at a barrier of its own, where {0._count} of {0.parties} have come",
    "Do as many threads come as the barrier was made for?",
)
_ITEM = (
    "an item of a queue of its own",
    "Is a put() missing, or does the thread end that should put one more?",
)
_TASK = "a task for its pool", "Does the program wait for more than it has given to the pool?"
_ENTER = threading.Condition.__enter__.__code__
_ACQUIRE_AGAIN = threading._PyRLock.acquire.__code__  # type: ignore[attr-defined]
_RUN, _WORK = pools._WorkItem.run.__code__, pools._worker.__code__
# For each library function: a function that describes a wait in it, or a text with advice. The
# text is a format string whose argument is the object being waited for, as in "{0._value}".
_MADE_OF_LOCKS: dict[CodeType, Describe | tuple[str, str]] = {
    function.__code__: description
    for function, description in (
        (threading.Event.wait, _EVENT),
        (threading.Condition.wait, _CONDITION),
        (threading.Semaphore.acquire, _SEMAPHORE),
        (threading.Barrier.wait, _BARRIER),
        (queue.Queue.get, _ITEM),
        (queue._PySimpleQueue.get, _ITEM),  # type: ignore[attr-defined]
        (queue.Queue.put, _room),
        (queue.Queue.join, _done),
        (futures.Future.result, _result),
        (futures.Future.exception, _result),
        (futures.wait, RESULT[:2]),
        (futures.as_completed, RESULT[:2]),
        (pools._worker, _TASK),
    )
}
