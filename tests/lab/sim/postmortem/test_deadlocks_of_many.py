"""The report of a deadlock of 1,024 ranks fits on a screen."""

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.sim import Deadlock, simulate

SCREEN_LINES = 24
MAX_COLUMNS = 300


def ring_of_sends() -> None:
    dist.send(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size())


def pairs() -> None:
    dist.recv(torch.zeros(1), dist.get_rank() ^ 1)


def one_is_missing() -> None:
    if dist.get_rank() == 77:
        dist.recv(torch.zeros(1), 0)
    dist.barrier()


def half_has_returned() -> None:
    if dist.get_rank() % 2:
        dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize(
    ("program", "phrase"),
    [
        (ring_of_sends, "ranks 0-1022  send to rank + 1, (1,) float32"),
        (pairs, "ranks 1, 3, 5, …, 1023 (512 ranks)  recv from rank - 1"),
        (
            one_is_missing,
            "ranks 0-76 and 78-1023 wait in barrier (call 1 of ranks 0-1023) for rank 77",
        ),
        (half_has_returned, "ranks 0, 2, 4, …, 1022 (512 ranks)  returned"),
    ],
)
def test_a_report_about_many_ranks_fits_on_a_screen(program: Any, phrase: str) -> None:
    with pytest.raises(Deadlock) as caught:
        simulate(program, 1024)
    lines = str(caught.value).splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= MAX_COLUMNS
    assert phrase in str(caught.value), str(caught.value)
    assert len(pickle.dumps(caught.value)) < 1_000_000
