"""A buffered send keeps the values it had; strict mode reports a tensor that changes too early."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from programs import me, neighbours, size

from distlab.sim import Deadlock, Mismatch, Options, simulate


def sends_head_to_head() -> float:
    x = torch.zeros(4)
    dist.send(torch.full((4,), float(me())), 1 - me())
    dist.recv(x, 1 - me())
    return x[0].item()


def test_sends_are_buffered_up_to_the_size_that_was_told() -> None:
    with pytest.raises(Deadlock):
        simulate(sends_head_to_head, 2, options=Options(eager_bytes=15))
    assert simulate(sends_head_to_head, 2, options=Options(eager_bytes=16)).results == [1.0, 0.0]


def overwrites_after_an_eager_send() -> float:
    x = torch.full((4,), 7.0)
    if me() == 0:
        dist.send(x, 1)
        x.zero_()
    else:
        time.sleep(1.0)
        dist.recv(x, 0)
    return x[0].item()


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_buffered_message_is_what_it_was_when_it_was_sent(is_strict: bool) -> None:
    options = Options(eager_bytes=16, is_strict=is_strict)
    assert simulate(overwrites_after_an_eager_send, 2, options=options).results == [0.0, 7.0]


def changes_what_is_under_way(call: str, when: str) -> None:
    x, y = torch.ones(4), torch.zeros(4 * size())
    right, left = neighbours()
    calls: dict[str, Callable[[], list[dist.Work]]] = {
        "isend": lambda: [dist.isend(x, right), dist.irecv(y[:4], left)],
        "all_reduce": lambda: [dist.all_reduce(x, async_op=True)],
        "broadcast": lambda: [dist.broadcast(x, 0, async_op=True)],
        "all_gather": lambda: [dist.all_gather(list(y.chunk(size())), x, async_op=True)],
        "reduce": lambda: [dist.reduce(x, 0, async_op=True)],
        "gather": lambda: [
            dist.gather(x, list(y.chunk(size())) if me() == 0 else None, 0, async_op=True)
        ],
        "reduce_scatter": lambda: [dist.reduce_scatter(x, list(y.chunk(size())), async_op=True)],
        "all_to_all": lambda: [dist.all_to_all_single(torch.zeros_like(y), y, async_op=True)],
    }
    works = calls[call]()
    if when == "too early" and me() == 0:
        (y if call in ("reduce_scatter", "all_to_all") else x).add_(1)
    for work in works:
        work.wait()
    x += 1
    dist.barrier()


CALLS = (
    *("isend", "all_reduce", "broadcast", "all_gather"),
    *("reduce", "gather", "reduce_scatter", "all_to_all"),
)


@pytest.mark.parametrize("call", CALLS)
def test_strict_mode_reports_a_buffer_that_was_changed_too_early(call: str) -> None:
    strict = Options(is_strict=True)
    with pytest.raises(Mismatch, match="rank 0 changed the tensor of") as caught:
        simulate(changes_what_is_under_way, 3, call, "too early", options=strict)
    assert caught.value.ranks == (0,)
    simulate(changes_what_is_under_way, 3, call, "in time", options=strict)
    simulate(changes_what_is_under_way, 3, call, "too early")  # goes unnoticed by default
