"""What a report says of the locks, queues and tasks that a thread of a rank waits for."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait

import pytest
import torch.distributed as dist

from distlab.sim import Deadlock, simulate


def report(program: Callable[[], object]) -> str:
    with pytest.raises(Deadlock) as caught:
        simulate(program, 1)
    return " ".join(str(caught.value).split())


def takes_from_an_empty_queue() -> None:
    queue.Queue[int]().get()


def puts_into_a_full_queue() -> None:
    full = queue.Queue[int](maxsize=2)
    for number in range(3):
        full.put(number)


def joins_a_queue_that_nobody_empties() -> None:
    tasks = queue.Queue[int]()
    tasks.put(1)
    tasks.join()


def joins_a_queue_whose_task_is_not_done() -> None:
    tasks = queue.Queue[int]()
    tasks.put(1)
    tasks.get()
    tasks.join()


def takes_a_semaphore_that_is_used_up() -> None:
    semaphore = threading.Semaphore(2)
    for _ in range(3):
        semaphore.acquire()


def comes_alone_to_a_barrier() -> None:
    threading.Barrier(3).wait()


def takes_its_lock_again() -> None:
    lock = threading.Lock()
    with lock, lock:
        pass


def takes_a_lock_that_an_ended_thread_had() -> None:
    lock = threading.Lock()
    thread = threading.Thread(target=lock.acquire, name="loader")
    thread.start()
    thread.join()
    lock.acquire()


def waits_for_a_future_that_nobody_sets() -> None:
    Future[int]().result()


def waits_for_several_futures() -> None:
    wait([Future[int]()])


def iterates_over_several_futures() -> None:
    for _ in as_completed([Future[int]()]):
        pass


def waits_in_a_task_for_another_one() -> None:
    pool = ThreadPoolExecutor(2, thread_name_prefix="saver")

    def save() -> object:
        time.sleep(0.1)
        return pool.submit(int).result()

    for task in [pool.submit(save), pool.submit(save)]:
        task.result()


def waits_for_the_task_behind_one_that_waits() -> None:
    pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
    pool.submit(threading.Event().wait)
    pool.submit(int).result()


def has_an_idle_pool() -> None:
    pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
    pool.submit(int).result()
    threading.Event().wait()


SAID: dict[Callable[[], object], tuple[str, ...]] = {
    takes_from_an_empty_queue: ("rank 0 waits for an item of a queue of its own,", "put() missing"),
    puts_into_a_full_queue: ("room in a queue of its own, which is full (2 of 2)", "Is a get()"),
    joins_a_queue_that_nobody_empties: (
        "(1 items still in it, 0 without task_done())",
        "Is a get() missing",
    ),
    joins_a_queue_whose_task_is_not_done: (
        "(0 items still in it, 1 without task_done())",
        "Is a task_done() missing",
    ),
    takes_a_semaphore_that_is_used_up: ("a semaphore of its own, which is at 0", "Is a release()"),
    comes_alone_to_a_barrier: ("a barrier of its own, where 1 of 3 have come", "as many threads"),
    takes_its_lock_again: ("a lock of its own, which it holds itself", "only once"),
    takes_a_lock_that_an_ended_thread_had: (
        "a lock of its own, which thread 'loader' still held when it ended",
        "Is a release() missing in thread 'loader'?",
    ),
    waits_for_a_future_that_nobody_sets: ("the result of a task of its own",),
    waits_for_several_futures: ("the result of a task of its own",),
    iterates_over_several_futures: ("the result of a task of its own",),
    waits_in_a_task_for_another_one: (
        "on rank 0 thread 'saver_0' waits for the result of a task that has not started, because "
        "no thread of its pool is free (0 of 2), and the main thread waits for the result of a "
        "task in thread 'saver_0'",
        "A task must not wait for another one of the same pool",
    ),
    waits_for_the_task_behind_one_that_waits: (
        "a task that has not started, because no thread of its pool is free (0 of 1)",
        "rank 0 waits for an event of its own",
        "thread 'saver_0'",
        "See what the threads of the pool wait for.",
    ),
    has_an_idle_pool: ("rank 0 waits for a task for its pool",),
}


@pytest.mark.parametrize("program", SAID, ids=lambda program: program.__name__)
def test_a_report_says_what_a_thread_waits_for(program: Callable[[], object]) -> None:
    text = report(program)
    assert [phrase for phrase in SAID[program] if phrase not in text] == [], text


def test_threads_and_pools_are_counted_by_rank() -> None:
    def program() -> list[str]:
        names = [threading.Thread().name, threading.Thread().name]
        with ThreadPoolExecutor(1) as pool:
            names.append(pool.submit(lambda: threading.current_thread().name).result())
        dist.barrier()
        return names

    for _ in range(2):
        names = ["Thread-1", "Thread-2", "ThreadPoolExecutor-0_0"]
        assert simulate(program, 2).results == [names, names]
