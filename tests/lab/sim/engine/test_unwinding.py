"""When a world ends early, the error names a rank, and all ranks are unwound."""

import contextlib
import pickle
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import me

from distlab.sim import RankError, simulate

Program = Callable[[], Any]


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("cannot travel")
        self.lock = threading.Lock()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class NeedsArguments(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("make", "name", "phrase"),
    [
        (lambda: ValueError("boom"), "ValueError", "rank 1 of 3 raised ValueError: boom"),
        (lambda: SystemExit(3), "SystemExit", "rank 1 of 3 raised SystemExit: 3"),
        (KeyboardInterrupt, "KeyboardInterrupt", "rank 1 of 3 raised KeyboardInterrupt"),
        (Unpicklable, "Unpicklable", "cannot travel"),
        (Unprintable, "Unprintable", "Unprintable"),
        (lambda: NeedsArguments(1, 2), "NeedsArguments", "1 and 2"),
    ],
    ids=["exception", "exit", "interrupt", "unpicklable", "unprintable", "arguments"],
)
def test_the_error_of_a_rank_names_it_and_can_be_pickled(
    make: Callable[[], BaseException], name: str, phrase: str
) -> None:
    def program() -> None:
        if me() == 1:
            raise make()
        dist.barrier()

    before = threading.active_count()
    with pytest.raises(RankError) as caught:
        simulate(program, 3)
    assert phrase in str(caught.value)
    assert (caught.value.ranks, caught.value.exception) == ((1,), name)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.ranks) == (str(caught.value), (1,))
    assert threading.active_count() == before


def catches_everything() -> None:
    if me() == 0:
        raise ValueError("boom")
    for _ in range(3):
        with contextlib.suppress(BaseException):
            dist.barrier()


def cleans_up() -> None:
    try:
        if me() == 2:
            dist.barrier()
            raise ValueError("boom")
        dist.barrier()
        dist.recv(torch.zeros(1), 2)
    finally:
        time.sleep(1.0)
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.parametrize("program", [catches_everything, cleans_up])
def test_programs_that_catch_everything_and_clean_up_are_unwound(program: Program) -> None:
    before = threading.active_count()
    with pytest.raises(RankError, match="boom"):
        simulate(program, 4)
    assert threading.active_count() == before


def raises_again() -> None:
    try:
        if me() == 2:
            raise ValueError("boom")
    except ValueError:
        dist.barrier()
        raise
    dist.recv(torch.zeros(1), 2)


def cleans_up_differently(*latecomers: int) -> None:
    if me() in latecomers:
        time.sleep(1.0)
    try:
        if me() == 2:
            raise ValueError("boom")
        dist.all_reduce(torch.zeros(1))
    finally:
        dist.barrier()


@pytest.mark.parametrize(
    ("program", "report"),
    [
        (cleans_up, "deadlock (missing rank)"),
        (raises_again, "deadlock (missing rank)"),
        (
            partial(cleans_up_differently, 2),
            "operation mismatch: all_reduce on ranks 0, 1 and 3, but barrier on rank 2",
        ),
        (
            partial(cleans_up_differently, 0, 1, 3),
            "operation mismatch: all_reduce on ranks 0, 1 and 3, but barrier on rank 2",
        ),
    ],
)
def test_an_error_comes_before_what_its_clean_up_ends_in(program: Program, report: str) -> None:
    with pytest.raises(RankError, match="rank 2 of 4 raised ValueError: boom") as caught:
        simulate(program, 4)
    assert f"Meanwhile, the world ended:\n{report}" in str(caught.value)
