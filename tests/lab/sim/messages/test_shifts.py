"""If ranks stay out of step, reports name the first call that they made at different lines."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from distlab.sim import Deadlock, Mismatch, simulate
from distlab.sim.messages.shifts import Splits

A, B, C = ((("/train.py", line, "step"),) * 2 for line in (10, 20, 30))


@pytest.mark.parametrize(
    ("sites", "now", "is_shifted"),
    [
        ({0: A, 1: A, 2: B}, {2: A}, True),  # rank 2 reaches A one call later
        ({0: A, 1: A, 2: B}, {0: B, 1: B}, True),
        ({0: A, 1: A, 2: B}, {0: A, 1: A, 2: B}, False),  # each rank still calls from its own line
        ({0: A, 1: A, 2: B}, {0: C, 2: C}, False),  # both now call from a third line
        ({0: A, 1: B}, {5: A}, False),  # rank 5 was not in that call
    ],
)
def test_what_points_to_a_shift(sites, now, is_shifted: bool) -> None:
    splits = Splits()
    splits.note("group", 1, sites)
    assert bool(splits.shift("group", now.items())) is is_shifted
    assert splits.shift("another group", now.items()) == ""


def logs_large_losses_and_meets_in_a_barrier() -> None:
    for step in range(3):
        dist.all_reduce(torch.ones(1))
        if step == 0 and dist.get_rank() == 2:
            dist.all_reduce(torch.ones(1))
    dist.barrier()


def test_the_call_that_one_rank_makes_more_is_named() -> None:
    with pytest.raises(Mismatch, match="Call 2 of the group was made by ranks 0 and 1 at test_sh"):
        simulate(logs_large_losses_and_meets_in_a_barrier, 3)


def sum_of(x: torch.Tensor) -> float:
    dist.all_reduce(x)
    return float(x)


def logs_a_key_of_its_own_and_meets_in_a_barrier() -> None:
    sum_of(torch.ones(1))
    if dist.get_rank() == 0:
        sum_of(torch.ones(1))
    sum_of(torch.ones(1))
    if dist.get_rank():
        dist.barrier()


def test_callers_are_named_where_all_ranks_call_from_one_helper() -> None:
    with pytest.raises(Mismatch, match=r"Call 2 .* by rank 0 at test_shifts.py:\d+ in logs_a_key"):
        simulate(logs_a_key_of_its_own_and_meets_in_a_barrier, 2)


def has_a_line_for_the_root() -> None:
    for _ in range(2 if dist.get_rank() else 3):
        if dist.get_rank() == 0:
            dist.broadcast(torch.ones(1), 0)
        else:
            dist.broadcast(torch.zeros(1), 0)


def takes_turns() -> None:
    for step in range(4):
        if step % 2 == dist.get_rank():
            dist.all_reduce(torch.ones(1))
        else:
            dist.all_reduce(torch.zeros(1))
    if dist.get_rank():
        dist.barrier()


@pytest.mark.parametrize("program", [has_a_line_for_the_root, takes_turns])
def test_lines_of_their_own_are_no_shift(program: Callable[[], None]) -> None:
    with pytest.raises(Deadlock) as caught:
        simulate(program, 2)
    assert "of the group was made" not in str(caught.value)


def evaluates(num_batches: int) -> None:
    for _ in range(num_batches):
        dist.all_reduce(torch.ones(1))
    dist.barrier()


def test_ranks_with_unequal_numbers_of_batches_are_counted() -> None:
    with pytest.raises(
        Mismatch,
        match=r"The call at test_shifts.py:\d+ in evaluates, called at .*, was made 2 times on "
        "rank 0 and once on ranks 1 and 2: do they have equally many batches",
    ):
        simulate(lambda: evaluates([2, 1, 1][dist.get_rank()]), 3)


def leaves_out_a_batch() -> None:
    for batch in range(4):
        if (dist.get_rank(), batch) == (1, 2):
            continue
        sum_of(torch.ones(1))


def test_a_batch_that_one_rank_leaves_out_is_counted() -> None:
    with pytest.raises(Deadlock, match="4 times on ranks 0 and 2 and 3 times on rank 1: do they"):
        simulate(leaves_out_a_batch, 3)


def calls_in_either_branch() -> None:
    for batch in range(3):
        if batch > dist.get_rank():
            dist.all_reduce(torch.ones(1))
        else:
            dist.all_reduce(torch.zeros(1))
    if dist.get_rank():
        dist.barrier()


def test_calls_in_two_branches_are_not_counted() -> None:
    with pytest.raises(Deadlock) as caught:
        simulate(calls_in_either_branch, 2)
    assert "equally many batches" not in str(caught.value)
