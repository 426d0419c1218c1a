"""Errors of ranks that have raised, and what is said of the other ranks."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from distlab.sim import RankError, simulate


def error_of(fn, num_ranks: int = 4) -> str:
    with pytest.raises(RankError) as caught:
        simulate(fn, num_ranks)
    return str(caught.value)


def test_where_others_wait_have_ended_or_run_is_said() -> None:
    def program() -> None:
        match dist.get_rank():
            case 0:
                dist.recv(torch.zeros(1), 2)
            case 1:
                return
            case 2:
                raise ValueError("bad sample")

    *_, title, first, second, third = error_of(program).splitlines()
    assert title == "The other ranks:"
    assert first.startswith("  rank 0  recv from rank 2, (1,) float32  test_raised.py:")
    assert second.startswith("  rank 1  returned without communicating  test_raised.py:")
    assert third == "  rank 3  running"


def test_a_limit_says_what_the_peer_does_instead() -> None:
    def program() -> None:
        if dist.get_rank() == 0:
            dist.irecv(torch.zeros(1), 2).wait(timedelta(seconds=1))
        elif dist.get_rank() == 1:
            dist.send(torch.ones(1), 0)

    text = error_of(program, 3)
    assert "Timed out waiting 1000ms" in text
    assert "  rank 1  send to rank 0, (1,) float32" in text
    assert "  rank 2  returned without communicating" in text


class AllFailed(BaseException):
    """As torch's CheckpointException: its text holds the tracebacks of all ranks."""

    def __str__(self) -> str:
        one = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\n'
        return f"ranks: [0, 1]\n{one}RuntimeError: no key v\n{one}RuntimeError: no key v"


def test_a_message_with_tracebacks_of_all_ranks_is_told_without_them() -> None:
    def program() -> None:
        raise AllFailed

    headline, _, below = error_of(program, 2).partition("\n\n")
    assert headline.endswith("AllFailed: ranks: [0, 1]\nRuntimeError: no key v")
    assert "a.py" not in below
    assert "in program" in below


def test_a_rank_that_is_late_is_told_with_its_line() -> None:
    def program() -> None:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
        if dist.get_rank() == 1:
            time.sleep(3)
        dist.all_reduce(torch.ones(1), group=group)

    late = error_of(program, 2).splitlines()[-1]
    assert late.startswith("  rank 1  running  test_raised.py:")


def test_a_check_that_fails_before_a_wait_is_told_so() -> None:
    def program() -> None:
        x = torch.zeros(1)
        if dist.get_rank() == 1:
            dist.irecv(x, 0)
            assert x.item() == 1
        dist.barrier()

    assert "Rank 1 had not waited for its irecv from rank 0, (1,) float32 (test_raised" in error_of(
        program, 2
    )
