"""If calls differ, the report says which ranks passed what, whatever the order of the calls."""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from programs import me, size
from torch.distributed.distributed_c10d import _get_default_store

from distlab.sim import Mismatch, simulate


def sums_another_size(odd: tuple[int, ...], last: int) -> None:
    if me() == last:
        time.sleep(0.05)
    dist.all_reduce(torch.ones(5 if me() in odd else 4))


@pytest.mark.parametrize("last", [0, 2, 3])
@pytest.mark.parametrize(
    ("odd", "sides"),
    [
        ((2,), "size 4 on ranks 0, 1 and 3, but with size 5 on rank 2"),
        ((0,), "size 5 on rank 0, but with size 4 on ranks 1-3"),
        ((1, 3), "size 4 on ranks 0 and 2, but with size 5 on ranks 1 and 3"),
    ],
)
def test_all_ranks_are_on_one_side_or_the_other(
    odd: tuple[int, ...], sides: str, last: int
) -> None:
    with pytest.raises(Mismatch) as caught:
        simulate(sums_another_size, 4, odd, last)
    assert str(caught.value).startswith(f"shape or dtype mismatch: all_reduce with {sides}")
    assert caught.value.ranks == (0, 1, 2, 3)


def own_roots() -> None:
    dist.broadcast(torch.ones(1), me())


def one_never_comes() -> None:
    if me() == size() - 1:
        dist.recv(torch.ones(1), 0)
    dist.all_reduce(torch.ones(4 + (me() == 1)))


def waits_later() -> str:
    work = dist.all_reduce(torch.ones(4 + (me() == 0)), async_op=True)
    try:
        assert work is not None
        work.wait()
    except Mismatch:
        return "caught"
    return "continued"


def in_another_order() -> None:
    sizes = (3, 2) if me() == 1 else (2, 3)
    for size_of in sizes:
        dist.all_reduce(torch.ones(size_of))


def differs_while_a_heart_beats() -> None:
    stop = threading.Event()

    def beats() -> None:
        while not stop.wait(1.0):
            _get_default_store().set(f"alive {me()}", "1")

    if me() == 2:
        return
    threading.Thread(target=beats, daemon=True).start()
    dist.all_reduce(torch.ones(4 + me()))
    stop.set()


def swallows_and_another_waits() -> None:
    group = dist.new_group(timeout=timedelta(seconds=5))
    if me() == 2:
        dist.recv(torch.ones(1), 0)
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.ones(4 + me()), group=group)


def adds_other_shapes() -> None:
    dist.all_reduce(torch.ones((4, 4) if me() else (2, 8)).to_sparse())


def mixes_dense_and_sparse() -> None:
    dist.all_reduce(torch.eye(2) if me() else torch.eye(2).to_sparse())


def cuts_differently() -> None:
    cuts = [[1, 3], [2, 2]][me()]
    dist.reduce_scatter(torch.zeros(cuts[me()]), [torch.ones(n) for n in cuts])


def forgets_group_in_one_branch() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, root = pairs[me() // 2], me() // 2 * 2
    if me() == root:
        dist.broadcast(torch.ones(2), root)
    else:
        dist.broadcast(torch.ones(2), root, group=mine)


def gathers_what_it_has() -> None:
    mine = torch.ones(4 + me())
    dist.all_gather([torch.empty_like(mine) for _ in range(size())], mine)


def scatters_what_it_has() -> None:
    mine = torch.ones(4 + me())
    dist.reduce_scatter(torch.empty_like(mine), [mine] * size())


@pytest.mark.parametrize("program", [gathers_what_it_has, scatters_what_it_has])
def test_ranks_that_have_unequal_parts_are_told_to_pad(program: Callable[[], object]) -> None:
    with pytest.raises(Mismatch, match="pad to the largest, and cut the result") as caught:
        simulate(program, 2)
    assert "NCCL" not in str(caught.value)


def test_parts_cannot_be_padded_at_two_lines_or_where_nothing_is_gathered() -> None:
    for program in (gathers_at_two_lines, waits_later):
        with pytest.raises(Mismatch) as caught:
            simulate(program, 2)
        assert "pad" not in str(caught.value)


def gathers_at_two_lines() -> None:
    if me():
        dist.all_gather([torch.ones(2)] * 2, torch.ones(2))
    else:
        dist.all_gather([torch.ones(3)] * 2, torch.ones(3))


FORGOTTEN = "is group= missing, or wrong, in the calls of ranks 0 and 2?"


@pytest.mark.parametrize(
    ("program", "num_ranks", "words"),
    [
        (own_roots, 4, "with root 2 on rank 2 and with root 3 on rank 3"),
        (own_roots, 8, "with root 2 on rank 2 and other values on 5 more"),
        (one_never_comes, 4, "size 4 on ranks 0 and 2, but with size 5 on rank 1"),
        (waits_later, 3, "size 5 on rank 0, but with size 4 on ranks 1 and 2"),
        (in_another_order, 3, "If these are two different calls of the program"),
        (differs_while_a_heart_beats, 3, "size 4 on rank 0, but with size 5 on rank 1"),
        (swallows_and_another_waits, 3, "size 4 on rank 0, but with size 5 on rank 1"),
        (adds_other_shapes, 2, "sparse (2, 8) float32 on rank 0"),
        (mixes_dense_and_sparse, 2, "dtype sparse (2, 2) float32 on rank 0, but with"),
        (cuts_differently, 2, "size"),
        (forgets_group_in_one_branch, 4, FORGOTTEN),
    ],
)
def test_the_report_says_which_ranks_gave_what(
    program: Callable[[], object], num_ranks: int, words: str
) -> None:
    with pytest.raises(Mismatch) as caught:
        simulate(program, num_ranks)
    assert words in str(caught.value)


def adds_unequal_sparse(last: int) -> None:
    if me() == last:
        time.sleep(1.0)
    table = torch.ones(100, 100) if me() == 0 else torch.eye(100)
    dist.all_reduce(table.to_sparse())


def test_the_time_of_a_sparse_sum_does_not_depend_on_who_comes_last() -> None:
    first, second = (simulate(adds_unequal_sparse, 2, last).seconds for last in (0, 1))
    assert first == second > 1.0
