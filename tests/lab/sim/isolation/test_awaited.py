"""Reports name the locks, queues and tasks that a thread waits for; see also broken_threads."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait

import pytest

from distlab.sim import Deadlock, simulate


def report(program: Callable[[], object], num_ranks: int = 1) -> str:
    with pytest.raises(Deadlock) as caught:
        simulate(program, num_ranks)
    return " ".join(str(caught.value).split())


def joins_a_queue_that_stays_full() -> None:
    tasks = queue.Queue[int]()
    tasks.put(1)
    tasks.join()


def takes_a_lock_that_an_ended_thread_had() -> None:
    lock = threading.Lock()
    thread = threading.Thread(target=lock.acquire, name="loader")
    thread.start()
    thread.join()
    lock.acquire()


def waits_for_a_future_that_no_thread_sets() -> None:
    Future[int]().result()


def waits_for_several_futures() -> None:
    wait([Future[int]()])


def iterates_over_several_futures() -> None:
    for _ in as_completed([Future[int]()]):
        pass


def waits_for_the_task_behind_one_that_waits() -> None:
    pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
    pool.submit(threading.Event().wait)
    pool.submit(int).result()


def has_an_idle_pool() -> None:
    pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
    pool.submit(int).result()
    threading.Event().wait()


TASK = "the result of a task of its own"
SAID: dict[Callable[[], object], tuple[str, ...]] = {
    joins_a_queue_that_stays_full: (
        "(1 items still in it, 0 without task_done())",
        "Is a get() missing",
    ),
    takes_a_lock_that_an_ended_thread_had: (
        "a lock of its own, which thread 'loader' still held when it ended",
        "Is a release() missing in thread 'loader'?",
    ),
    waits_for_a_future_that_no_thread_sets: (TASK,),
    waits_for_several_futures: (TASK,),
    iterates_over_several_futures: (TASK,),
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


def waits_for_a_thread_that_waits() -> None:
    thread = threading.Thread(target=threading.Event().wait, name="saver")
    thread.start()
    thread.join()


def takes_its_own_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def sleeps_on_and_on() -> None:
    while True:
        time.sleep(1)


def test_a_process_may_change_what_ranks_look_for_between_sleeps() -> None:
    text = report(sleeps_on_and_on, 2)
    assert "ranks 0 and 1 wait for something, with only sleeps in between, and no thread" in text
    assert "Only a process outside the simulation could still change the file" in text
    assert "wait for that process with wait() or join()" in text


@pytest.mark.parametrize(
    ("program", "row"),
    [
        (waits_for_a_thread_that_waits, "0-2 wait for the end of thread 'saver' test_awaited.py:"),
        (waits_for_a_thread_that_waits, "0-2 wait for an event of their own test_awaited.py:"),
        (takes_its_own_lock, "of their own, which each of them holds itself test_awaited.py:"),
    ],
)
def test_a_row_for_several_ranks_speaks_of_several(program: Callable[[], object], row: str) -> None:
    assert row in report(program, 3)
