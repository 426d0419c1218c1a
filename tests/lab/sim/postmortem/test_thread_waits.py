"""Threads of a rank that wait for each other: which one a report names, and what it advises."""

import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from distlab.sim import Deadlock, simulate


def deadlock_of(program: Callable[[], object], num_ranks: int) -> tuple[Deadlock, str]:
    with pytest.raises(Deadlock) as caught:
        simulate(program, num_ranks)
    return caught.value, " ".join(str(caught.value).split())


def test_ranks_whose_threads_wait_alike_are_told_once() -> None:
    def program() -> None:
        if dist.get_rank() < 2:
            never = threading.Event()
            thread = threading.Thread(target=never.wait, name="saver")
            thread.start()
            thread.join()
        elif dist.get_rank() == 2:
            threading.Semaphore(0).acquire()

    deadlock, text = deadlock_of(program, 3)
    assert deadlock.ranks == (0, 1, 2)
    assert text.startswith(
        "deadlock (thread wait): on ranks 0 and 1 thread 'saver' waits for an event of its own, "
        "and the main thread waits for the end of thread 'saver' and also (thread wait): rank 2 "
        "waits for a semaphore of its own, which is at 0, and no thread of it can go on"
    )
    assert "ranks 0 and 1 waits for an event of its own in given" not in text
    assert text.endswith("Is its set() missing, or does the thread end that sets it?")


def test_a_lock_is_to_be_released_before_a_join() -> None:
    def program() -> None:
        lock = threading.Lock()

        def save() -> None:
            with lock:
                pass

        thread = threading.Thread(target=save, name="saver")
        with lock:
            thread.start()
            thread.join()

    _, text = deadlock_of(program, 1)
    assert "thread 'saver' waits for a lock of its own, held by the main thread" in text
    assert text.endswith("Release the lock before waiting for a thread that needs it.")


def test_many_threads_at_one_line_are_counted() -> None:
    def program() -> None:
        never = threading.Event()
        for _ in range(20):
            threading.Thread(target=never.wait).start()
        never.wait()

    _, text = deadlock_of(program, 1)
    assert "waits for an event of its own (20 times) test_thread_waits.py:" in text
