"""Cycles in the order in which ranks come to collectives and to new communicators."""

import inspect
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
from distlab.sim.gpu.orders import MAX_NODES, MAX_OPEN, Orders
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


def line_of(program: Any, text: str) -> int:
    """Return the number of a program's first line that has a text."""
    lines, first = inspect.getsourcelines(program)
    return first + next(k for k, line in enumerate(lines) if text in line)


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


KERNELS = (
    "kernels of {} communicators may wait for each other for ever; use one order on all ranks, "
    "or wait for one before the other"
)
CREATION = "so these hang; make these calls in one order on all ranks"


@pytest.mark.parametrize(
    ("is_eager", "verb", "harm"),
    [(True, "launches", KERNELS.format(4)), (False, "calls", CREATION)],
)
def test_a_cycle_of_four_groups_of_which_no_two_ranks_share_two(
    is_eager: bool, verb: str, harm: str
) -> None:
    (line,) = wrong(partial(grid, lambda rank: rank % 3 == 0, is_eager=is_eager), 4)
    assert line.startswith(f"rank 0 {verb} all_reduce (call 1 of ranks 0 and 1) (test_orders.py:")
    assert "before all_reduce (call 1 of ranks 0 and 2) (test_orders.py:" in line
    assert "rank 2 all_reduce (call 1 of ranks 0 and 2)" in line
    assert ", and rank 1 all_reduce (call 1 of ranks 1 and 3)" in line
    assert line.endswith(harm)


def reduces_in_a_helper(*, is_eager: bool) -> None:
    rank, works = join(is_eager=is_eager), list[Any]()
    ends = dist.new_group([0, 2])

    def reduce(group: Any = None) -> None:
        works.append(dist.all_reduce(ones(), group=group, async_op=True))

    if rank == 0:
        reduce(ends)  # before
    reduce()  # all
    if rank == 2:
        reduce(ends)  # behind
    for work in works:
        work.wait()


@pytest.mark.parametrize(("is_eager", "harm"), [(True, KERNELS.format("two")), (False, CREATION)])
def test_callers_are_named_where_one_function_makes_all_calls(is_eager: bool, harm: str) -> None:
    (line,) = wrong(partial(reduces_in_a_helper, is_eager=is_eager), 3)
    before, everywhere, behind = (
        f"(test_orders.py:{line_of(reduces_in_a_helper, text)} in reduces_in_a_helper)"
        for text in ("# before", "# all", "# behind")
    )
    assert f"all_reduce (call 1 of ranks 0 and 2) {before}" in line
    assert f"all_reduce (call 1 of ranks 0-2) {everywhere}" in line
    assert behind[1:-1] in line
    assert line.endswith(harm)


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


def test_a_rank_that_is_far_ahead_is_remembered_only_in_part() -> None:
    orders, streams = Orders(), [Stream(f"stream {k}", 0) for k in range(2)]
    orders.created(Launched(0, (0, 1)), Communicator("pair"), (0, 1), {})
    for number in range(MAX_NODES):
        for group, on in enumerate(streams):
            on.next_number()
            orders.launched(Launched(0, (0, 1)), Communicator(group), number, on, {})
    uses = orders._open[0]
    assert len(uses) == 1 + MAX_OPEN
    assert len(uses[0].node.after) == MAX_NODES


# Creation of communicators


def hand_over(*, is_warm: bool = False, is_late: bool = False) -> None:
    """Rank 0 sends before a barrier, and rank 1 receives after it."""
    rank, x = join(), ones()
    if is_warm:
        dist.all_reduce(x)
    for _ in range(2):
        if rank == 0 and not is_late:
            dist.isend(x, 1)  # before
        dist.barrier()
        if rank == 0 and is_late:
            dist.isend(x, 1)
        if rank == 1:
            dist.irecv(x, 0).wait()  # after


@pytest.mark.filterwarnings("ignore:barrier")
@pytest.mark.parametrize("is_warm", [False, True])
def test_a_pair_whose_communicator_the_other_rank_creates_behind_a_barrier(is_warm: bool) -> None:
    (line,) = wrong(partial(hand_over, is_warm=is_warm))
    barrier = f"barrier (call {1 + is_warm} of ranks 0 and 1)"
    at = {text: f"test_orders.py:{line_of(hand_over, text)}" for text in ("# before", "# after")}
    assert line.startswith(f"rank 0 calls isend to rank 1 ({at['# before']} in hand_over) before ")
    assert f"rank 1 {barrier} (test_orders.py:" in line
    assert f"before irecv from rank 0 ({at['# after']} in hand_over): the first call" in line
    assert line.endswith("so these hang; make these calls in one order on all ranks")
    assert is_documented(line) != is_warm


@pytest.mark.filterwarnings("ignore:barrier")
def test_a_pair_whose_communicator_both_ranks_create_behind_a_barrier() -> None:
    assert wrong(partial(hand_over, is_late=True)) == []


def sums_around_a_message(*, reads_first: bool) -> None:
    """Rank 1 receives before or after it reads a sum, to which rank 0 comes behind its send."""
    rank, x, total = join(), ones(), ones()
    dist.all_reduce(ones())
    if rank == 0:
        dist.isend(x, 1)
    dist.all_reduce(total)
    if reads_first:
        total.tolist()
    if rank == 1:
        dist.irecv(x, 0).wait()
    total.tolist()


def test_only_a_host_that_waits_comes_too_late() -> None:
    (line,) = wrong(partial(sums_around_a_message, reads_first=True))
    assert "rank 1 all_reduce (call 2 of ranks 0 and 1)" in line
    assert wrong(partial(sums_around_a_message, reads_first=False)) == []


def ring(*, by_parity: bool = False, is_batched: bool = False) -> None:
    """Send to the right and receive from the left, one message after the other or in a batch."""
    rank, size, x, y = join(), dist.get_world_size(), ones(), ones()
    send = dist.P2POp(dist.isend, x, (rank + 1) % size)
    receive = dist.P2POp(dist.irecv, y, (rank - 1) % size)
    ops = [receive, send] if by_parity and rank % 2 else [send, receive]
    works = dist.batch_isend_irecv(ops) if is_batched else [op.op(op.tensor, op.peer) for op in ops]
    for work in works:
        work.wait()


def test_a_ring_in_which_all_send_first_hangs_in_its_first_messages() -> None:
    (line,) = wrong(ring, 3)
    assert line.startswith("rank 0 calls isend to rank 1")
    assert ", rank 2 isend to rank 0" in line
    assert ", and rank 1 isend to rank 2" in line
    assert line.endswith("give the messages of each rank to one batch_isend_irecv")
    assert wrong(partial(ring, is_batched=True), 3) == []
    assert wrong(partial(ring, by_parity=True), 4) == []


def starts_with_a_batch() -> None:
    """Rank 1 sums over another group before it takes part in its group's first batch."""
    rank, other = join(), dist.new_group([0, 1])
    if rank == 1:
        dist.all_reduce(ones(), group=other, async_op=True)
    peer = dist.P2POp(dist.isend if rank == 0 else dist.irecv, ones(), 1 - rank)
    for work in dist.batch_isend_irecv([peer]):
        work.wait()
    if rank == 0:
        dist.all_reduce(ones(), group=other, async_op=True)


def test_a_batch_that_creates_the_communicator_of_its_group_is_called_one() -> None:
    (line,) = wrong(starts_with_a_batch)
    assert "before a batch with the irecv from rank 0" in line
