"""Broken programs: threads of a rank, swallowed errors, and endless polling."""

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from catalogue import (
    CYCLE,
    KEY,
    MISSING,
    OPERATION,
    SHAPE,
    THREAD,
    data,
    deadlock,
    me,
    mismatch,
)
from torch.distributed.distributed_c10d import _get_default_store

# Threads


@deadlock(
    2,
    THREAD,
    (0,),
    "rank 0 waits for an item of a queue of its own, and no thread of it can go on",
    "in waits_for_a_queue",
    "Is a put() missing, or does the thread end that should put one more?",
)
def waits_for_a_queue() -> None:
    """Rank 0 waits for a batch that no thread loads."""
    if me() == 0:
        queue.Queue[int]().get()
    dist.barrier()


@deadlock(
    1,
    THREAD,
    (0,),
    "rank 0 waits for a lock of its own, which it holds itself",
    "A thread can take a Lock only once",
)
def takes_its_own_lock_twice() -> None:
    """A thread takes a non-reentrant lock that it already holds."""
    lock = threading.Lock()
    with lock, lock:
        dist.barrier()


@deadlock(
    2,
    THREAD,
    (0,),
    "on rank 0 thread 'one' waits for a lock of its own, held by thread 'two', and thread 'two' ",
    "lock of its own, held by thread 'two' broken_threads.py:",
    "in take, thread 'one'",
    "Let all threads take these locks in the same order.",
)
def two_threads_take_two_locks() -> None:
    """Two threads of rank 0 take two locks in opposite orders."""
    first, second = threading.Lock(), threading.Lock()

    def take(one: threading.Lock, other: threading.Lock) -> None:
        with one:
            time.sleep(0.1)
            with other:
                pass

    if me() == 0:
        threads = [
            threading.Thread(target=take, args=(first, second), name="one"),
            threading.Thread(target=take, args=(second, first), name="two"),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    dist.barrier()


@deadlock(
    3,
    MISSING,
    (2,),
    "ranks 0 and 1 wait in barrier (call 1 of ranks 0-2) for rank 2, but rank 2 waits for rank 0",
    "rank 2 recv from rank 0, (4,) float32 broken_threads.py:",
    "in a_saver_waits_for_the_step_after",
    "Let rank 0 send before the barrier, or let rank 2 receive after it.",
)
def a_saver_waits_for_the_step_after() -> None:
    """Rank 2 waits for its saver, which waits for a message that rank 0 sends after the barrier."""
    if me() == 2:
        with ThreadPoolExecutor(1) as saver:
            saver.submit(dist.recv, data(), 0).result()
    dist.barrier()
    if me() == 0:
        dist.send(data(), 2)


@mismatch(2, SHAPE, (0, 1), "all_reduce with size 2 on rank 0, but with size 3 on rank 1")
def a_thread_reduces_another_size() -> None:
    """Ranks reduce tensors of different sizes, in a thread whose exceptions go unnoticed."""
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(2 + me()),))
    thread.start()
    thread.join()


# Swallowed errors


@mismatch(3, OPERATION, (2,), "operation mismatch: ", "broadcast on rank 2")
def a_mismatch_is_swallowed_and_the_rank_leaves() -> None:
    """Rank 2 makes a different call, swallows the error, and returns; the others continue."""
    try:
        if me() == 2:
            dist.broadcast(data(), 0)
        else:
            dist.all_reduce(data())
    except RuntimeError:
        return
    dist.barrier()


# Waits that never end


@deadlock(
    2,
    CYCLE,
    (0, 1),
    "rank 0 waits for rank 1 to send, and rank 1 waits for rank 0 to send",
    "in both_poll_for_a_message",
)
def both_poll_for_a_message() -> None:
    """Both ranks poll for a message that neither has sent."""
    work = dist.irecv(data(), 1 - me())
    while not work.is_completed():
        pass


@deadlock(2, KEY, (0,), "rank 0 waits for the key 'ready', which no rank has set")
def polls_for_a_key() -> None:
    """Rank 0 polls for a key that rank 1 never sets."""
    while me() == 0 and not _get_default_store().check(["ready"]):
        time.sleep(0.001)


@deadlock(1, THREAD, (0,), "waits for other threads at a barrier of its own", "Do as many threads")
def makes_a_barrier_for_too_many() -> None:
    """A barrier expects three threads, but only two exist."""
    barrier = threading.Barrier(3)
    threading.Thread(target=barrier.wait).start()
    barrier.wait()


@deadlock(1, THREAD, (0,), "waits for room in a queue of its own", "Is a get() missing")
def fills_its_queue() -> None:
    """Two items are put into a queue that has room for one."""
    full = queue.Queue[int](maxsize=1)
    full.put(1)
    full.put(2)


@deadlock(2, KEY, (1,), "'done', which rank 0 has deleted at", "Delete a key only when all ranks")
def deletes_a_key_too_early() -> None:
    """Rank 0 deletes a key before rank 1 has read it."""
    store = _get_default_store()
    if me() == 0:
        store.set("done", "1")
        store.delete_key("done")
    dist.barrier()
    if me() == 1:
        store.get("done")
