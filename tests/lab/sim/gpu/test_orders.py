"""Cycles in the order in which ranks come to collectives and to new communicators."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.sim import Options, simulate
from distlab.sim.gpu.orders import MAX_OPEN, Orders
from distlab.sim.gpu.streams import Stream
from distlab.sim.messages.message import Communicator
from distlab.sim.messages.pending import Pending

Program = Callable[[], object]
NCCL = Options(semantics="nccl")
DOCUMENT = Path(__file__).parents[4] / "docs/simulator.md"


def join(*, is_eager: bool = False) -> int:
    """Join a world whose communicators exist at once, or only from their first calls on."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device if is_eager else None)
    return dist.get_rank()


def ones() -> Tensor:
    return torch.ones(4, device="cuda")


def wrong(program: Program, num_ranks: int = 2) -> list[str]:
    ran = simulate(program, num_ranks, cluster="dgx-h100", options=NCCL, joined=False)
    assert ran.gpu_time is not None
    return ran.gpu_time.wrong


def is_documented(line: str) -> bool:
    """Return whether the documentation has a finding, apart from its places."""
    text = re.sub(r" \(\w+\.py:\d+ in \w+(, then .*?)?\)", "", line)
    return text in DOCUMENT.read_text()


# Kernels of several communicators


def two_groups(*, waits: bool = False) -> None:
    rank = join(is_eager=True)
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    reduce_over(groups if rank == 0 else groups[::-1], waits=waits)


def test_two_groups_are_told_as_in_the_documentation() -> None:
    (line,) = wrong(two_groups)
    assert is_documented(line), line


def reduce_over(groups: list[Any], *, waits: bool) -> None:
    works = []
    for group in groups:
        works.append(dist.all_reduce(ones(), group=group, async_op=True))
        if waits:
            works[-1].wait()
    for work in works:
        work.wait()


def grid(has_row_first: Callable[[int], bool], *, is_eager: bool, waits: bool = False) -> None:
    """Sum over the rows and columns of a grid of 2 x 2 ranks, twice."""
    rank = join(is_eager=is_eager)
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = [rows[rank // 2], columns[rank % 2]]
    for _ in range(2):
        reduce_over(groups if has_row_first(rank) else groups[::-1], waits=waits)


@pytest.mark.parametrize("is_eager", [True, False])
def test_a_cycle_of_four_groups_of_which_no_two_ranks_share_two(is_eager: bool) -> None:
    (line,) = wrong(partial(grid, lambda rank: rank % 3 == 0, is_eager=is_eager), 4)
    assert line.startswith("rank 0 launches all_reduce (call 1 of ranks 0 and 1) (test_orders.py:")
    assert "before all_reduce (call 1 of ranks 0 and 2) (test_orders.py:" in line
    assert "rank 2 all_reduce (call 1 of ranks 0 and 2)" in line
    assert ", and rank 1 all_reduce (call 1 of ranks 1 and 3)" in line
    assert line.endswith(
        "kernels of 4 communicators may wait for each other for ever; use one order on all ranks, "
        "or wait for one before the other"
    )


@pytest.mark.parametrize("has_row_first", [lambda _: True, lambda r: r < 2, lambda r: r % 2 == 0])
@pytest.mark.parametrize("is_eager", [True, False])
def test_orders_that_form_no_cycle_are_right(
    has_row_first: Callable[[int], bool], is_eager: bool
) -> None:
    assert wrong(partial(grid, has_row_first, is_eager=is_eager), 4) == []


def test_a_wait_between_two_groups_orders_their_kernels() -> None:
    program = partial(grid, lambda rank: rank % 3 == 0, is_eager=True, waits=True)
    with pytest.raises(RuntimeError, match="deadlock"):
        wrong(program, 4)
    assert wrong(partial(grid, lambda _: True, is_eager=True, waits=True), 4) == []


class Launched(Pending):
    """A collective of a rank, without a world."""

    def __init__(self, rank: int, group: tuple[int, ...]) -> None:
        self.rank, self.group, self.site = rank, group, ("", 0, "")


def test_what_all_ranks_have_come_to_in_one_order_is_forgotten() -> None:
    orders, streams = Orders(), [Stream(f"stream {k}", 0) for k in range(4)]
    for number in range(3 * MAX_OPEN):
        for rank in range(2):
            for group in range(2):
                on = streams[2 * rank + group]
                on.next_number()
                operation, communicator = Launched(rank, (0, 1)), Communicator(group)
                orders.launched(operation, communicator, number, on, {})
    assert orders._nodes == {}
    assert all(len(uses) <= 2 for uses in orders._open.values())
    assert orders.lines({}) == []
