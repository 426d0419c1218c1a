"""What has become of threads, of tasks of a pool and of daemons, in reports."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from distlab.sim import Deadlock, simulate


def report(fn: Callable[[], None]) -> str:
    with pytest.raises(Deadlock) as caught:
        simulate(fn, 2)
    return str(caught.value)


def saves() -> None:
    if dist.get_rank() == 0:
        raise OSError("disk full")
    dist.barrier()


def never_asks() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(saves)


def asks() -> None:
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(saves)
        if dist.get_rank() == 0:
            assert isinstance(task.exception(), OSError)


def catches() -> None:
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(saves)
        if dist.get_rank() == 0:
            with pytest.raises(OSError, match="disk full"):
                task.result()


def test_the_error_of_a_task_is_told_if_nobody_has_asked_for_it() -> None:
    note = next(line for line in report(never_asks).splitlines() if line.startswith("A task in "))
    assert note.startswith(
        "A task in thread 'ThreadPoolExecutor-0_0' of rank 0 ended with OSError: disk full, "
        "test_thread_notes.py:"
    )
    assert note.endswith("in saves, and nobody has asked for its result.")


@pytest.mark.parametrize("fn", [asks, catches])
def test_an_error_that_the_program_knows_is_not_told(fn: Callable[[], None]) -> None:
    assert "disk full" not in report(fn)


def sends_later() -> None:
    time.sleep(1)
    dist.send(torch.ones(1), 1)


def forgets_to_join() -> None:
    if dist.get_rank() == 0:
        threading.Thread(target=sends_later, name="sender", daemon=True).start()
        time.sleep(0.1)
    else:
        dist.recv(torch.ones(1), 0)


def test_a_daemon_that_has_ended_with_its_rank_is_named() -> None:
    note = report(forgets_to_join).splitlines()[-1]
    assert note.startswith("Rank 0 ended while its daemon thread 'sender' was at test_thread_notes")
    assert note.endswith("in sends_later: is a join() missing?")


def test_of_daemons_nothing_is_said_if_their_rank_is_not_to_blame() -> None:
    def program() -> None:
        if dist.get_rank() == 1:
            threading.Thread(target=lambda: time.sleep(9), daemon=True).start()
            time.sleep(0.1)
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            dist.recv(torch.ones(1), 0)

    assert "daemon" not in report(program)
