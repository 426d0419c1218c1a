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


@pytest.mark.parametrize("fn", [asks, catches])
def test_an_error_that_the_program_knows_is_not_told(fn: Callable[[], None]) -> None:
    assert "disk full" not in report(fn)


def test_of_daemons_nothing_is_said_if_their_rank_is_not_to_blame() -> None:
    def program() -> None:
        if dist.get_rank() == 1:
            threading.Thread(target=lambda: time.sleep(9), daemon=True).start()
            time.sleep(0.1)
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            dist.recv(torch.ones(1), 0)

    assert "daemon" not in report(program)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def fails() -> None:
    raise Unprintable


def test_an_error_that_cannot_be_printed_reaches_who_asks_for_it() -> None:
    def program() -> bool:
        with ThreadPoolExecutor(1) as pool:
            return isinstance(pool.submit(fails).exception(), Unprintable)

    assert simulate(program, 2).results == [True, True]


def test_equal_notes_of_many_ranks_are_one_line() -> None:
    def program() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(int, "x")
        if dist.get_rank() == 0:
            dist.barrier()

    with pytest.raises(Deadlock) as caught:
        simulate(program, 64)
    (note,) = [line for line in str(caught.value).splitlines() if "what ran in thread" in line]
    assert note.startswith(
        "On ranks 0-63, what ran in thread 'ThreadPoolExecutor-0_0' ended with V"
    )
    assert "base 10: 'x', and nobody has asked" in note


def test_who_asks_for_the_first_error_of_a_map_knows_of_it() -> None:
    def program() -> None:
        with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="'x'"):
            list(pool.map(int, "xyz"))
        if dist.get_rank() == 0:
            dist.barrier()

    assert "what ran" not in report(program)


def test_a_condition_whose_lock_somebody_holds() -> None:
    def program() -> None:
        condition = threading.Condition()

        def waits() -> None:
            with condition:
                condition.wait()

        thread = threading.Thread(target=waits, name="w")
        thread.start()
        time.sleep(1)
        with condition:
            condition.notify()
            thread.join()

    text = report(program)
    assert "thread 'w' waits for a lock of its own, held by the main thread" in text
    assert "notify" not in text
