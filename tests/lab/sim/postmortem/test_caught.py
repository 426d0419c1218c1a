"""Exceptions that the program has caught, in reports."""

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from distlab.sim import Deadlock, Mismatch, SimulationError, simulate


def skips_a_round_of_other_sizes() -> None:
    for step in range(3):
        try:
            if (step, dist.get_rank()) == (1, 2):
                raise ValueError("bad sample")
            dist.all_reduce(torch.ones(step + 1))
        except ValueError:
            pass


def report(fn: Callable[[], None], kind: type[SimulationError]) -> list[str]:
    with pytest.raises(kind) as caught:
        simulate(fn, 3)
    return str(caught.value).splitlines()


def test_a_rank_that_is_a_call_ahead_may_have_come_through_a_handler() -> None:
    question = report(skips_a_round_of_other_sizes, Mismatch)[-1]
    assert question.startswith("The except of line 19 can hide an error: did a rank come through")


def refuses_long_ago() -> None:
    with contextlib.suppress(ValueError, RuntimeError):
        dist.broadcast(torch.ones(2, 2).T, 0)
    for _ in range(3 if dist.get_rank() else 2):
        dist.barrier()


def test_what_was_refused_long_ago_is_not_told() -> None:
    assert not any("broadcast raised" in line for line in report(refuses_long_ago, Deadlock))


def has_a_barrier_in_its_finally() -> None:
    try:
        for step in range(3):
            if (step, dist.get_rank()) == (1, 1):
                raise ValueError("bad sample")
            dist.all_reduce(torch.ones(1))
    except ValueError:
        return
    finally:
        dist.barrier()


def test_a_handler_before_the_other_rank_s_call_is_asked_about() -> None:
    question = report(has_a_barrier_in_its_finally, Mismatch)[-1]
    assert question.endswith(
        "can hide an error: did a rank come through it, and so leave out a call?"
    )


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


def handles_what_cannot_be_printed() -> None:
    try:
        if dist.get_rank() == 2:
            raise Unprintable
        dist.all_reduce(torch.ones(1))
    except Unprintable:
        dist.send(torch.ones(1), 0)


def test_an_exception_that_cannot_be_printed_is_told() -> None:
    assert "an except deals with Unprintable: it cannot be printed, test_caught.py:" in "\n".join(
        report(handles_what_cannot_be_printed, Deadlock)
    )
