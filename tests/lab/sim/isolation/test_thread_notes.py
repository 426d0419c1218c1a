"""Notes in reports about tasks in thread pools; the catalogue of deadlocks has more notes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from distlab.sim import Deadlock, simulate


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def fail() -> None:
    raise Unprintable


def test_an_error_that_cannot_be_printed_reaches_who_asks_for_it() -> None:
    def program() -> bool:
        with ThreadPoolExecutor(1) as pool:
            return isinstance(pool.submit(fail).exception(), Unprintable)

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
