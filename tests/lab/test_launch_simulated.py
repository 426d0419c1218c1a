"""``launch.run(backend="sim")`` is called as for real processes, and raises the same errors."""

import ctypes
import os
import sys
import time
from collections.abc import Callable

import psutil
import pytest
import torch
import torch.distributed as dist

from distlab import launch
from distlab.sim import Cluster, Options
from solutions.phase1_data_parallel.collectives import ALL_REDUCES

TIMEOUT_S = 3.0
VERDICT_S = 30.0  # any limit far below "forever" would do


def who_am_i() -> tuple[int, int, launch.Context]:
    return dist.get_rank(), dist.get_world_size(), launch.context()


def total(name: str) -> float:
    x = torch.full((5,), float(dist.get_rank()))
    ALL_REDUCES[name](x, None)
    return float(x.sum())


def loops_forever() -> None:
    if dist.get_rank() == 2:
        while True:
            pass
    dist.barrier()


def leaves() -> None:
    if dist.get_rank() == 1:
        os._exit(0)
    dist.barrier()


def exits() -> None:
    if dist.get_rank() == 1:
        sys.exit(0)
    dist.barrier()


def segfaults() -> None:
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.barrier()


def sends_first() -> None:
    dist.send(torch.ones(2), (dist.get_rank() + 1) % 3)


def one_is_missing() -> None:
    if dist.get_rank() != 1:
        dist.barrier()


def raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("boom")
    dist.barrier()


def disagrees() -> None:
    dist.all_reduce(torch.ones(3 if dist.get_rank() == 1 else 4))


def runs_out_of_memory() -> None:
    if dist.get_rank() == 1:
        torch.ones(1000)


def unpicklable() -> object:
    return (n for n in range(3))


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 64])
def test_results_come_by_rank_and_context_is_known(num_ranks: int) -> None:
    answers = launch.run(who_am_i, num_ranks, backend="sim")
    cpu = torch.device("cpu")
    assert answers == [
        (rank, num_ranks, launch.Context(rank, num_ranks, cpu)) for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("name", list(ALL_REDUCES))
def test_the_lessons_give_what_they_give_on_gloo(name: str) -> None:
    assert launch.run(total, 3, name, backend="sim") == launch.run(total, 3, name, backend="gloo")


def test_simulate_gives_the_trace_too() -> None:
    outcome = launch.simulate(total, 4, "recursive_doubling", cluster="dgx-h100")
    assert outcome.results == [30.0] * 4
    assert outcome.trace.messages == [2] * 4
    assert outcome.trace.bytes_sent == [40.0] * 4
    assert outcome.seconds > 0


ERRORS: dict[Callable[[], object], tuple[type[launch.LaunchError], int | None, str]] = {
    loops_forever: (launch.RankHung, 2, "simulated rank 2 of 3 is at test_launch_simulated.py"),
    leaves: (launch.RankExited, 1, "rank 1 of 3 ended by os._exit(0), test_launch_simulated.py:"),
    exits: (launch.RankExited, 1, "rank 1 of 3 raised SystemExit: 0"),
    segfaults: (launch.RankCrashed, 1, "killed by SIGSEGV at test_launch_simulated.py"),
    sends_first: (launch.RankHung, None, "send to rank"),
    one_is_missing: (launch.RankHung, 1, "rank 1"),
    raises: (launch.RankFailed, 1, "rank 1 of 3 raised ValueError: boom"),
    disagrees: (launch.RankFailed, None, "size"),
    unpicklable: (launch.RankFailed, None, "cannot pickle 'generator' object"),
}


@pytest.mark.parametrize("fn", ERRORS, ids=lambda fn: fn.__name__)
def test_every_failure_is_the_same_clear_error_as_in_a_real_world(fn: Callable[[], object]) -> None:
    kind, rank, phrase = ERRORS[fn]
    launch.run(who_am_i, 1, backend="sim")  # so that the time measured below includes no imports
    start = time.monotonic()
    with pytest.raises(launch.LaunchError) as caught:
        launch.run(fn, 3, backend="sim", timeout_s=TIMEOUT_S)
    assert type(caught.value) is kind, caught.value
    assert phrase in str(caught.value)
    assert caught.value.rank == rank
    assert time.monotonic() - start < VERDICT_S
    servers = psutil.Process().children()
    assert [child for server in servers for child in server.children()] == []


def test_running_out_of_simulated_memory_is_its_own_error() -> None:
    options = Options(has_devices=True, capacity_bytes=2000)
    with pytest.raises(launch.RankOutOfMemory, match="out of memory in") as caught:
        launch.simulate(runs_out_of_memory, 3, options=options)
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "sim", "cluster": "dgx-h10"}, "Did you mean 'dgx-h100'"),
        ({"backend": "sim", "cluster": Cluster(1, 2)}, "has only 2"),
        ({"backend": "gloo", "cluster": "laptop"}, "is for backend sim"),
    ],
)
def test_an_impossible_cluster_is_refused_before_anything_starts(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(launch.SetupError, match=message):
        launch.run(who_am_i, 4, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_dir": "logs"}, "output_dir='logs' is for real processes"),
        ({"device": "cuda"}, "backend sim computes on the CPU"),
        ({"world_size": 1025}, "has 1 to 1,024 ranks, got 1,025"),
    ],
)
def test_what_a_simulation_cannot_do_is_refused_before_it_starts(
    arguments: dict[str, object], message: str
) -> None:
    request = {"world_size": 2, "backend": "sim", **arguments}
    with pytest.raises(launch.SetupError, match=message):
        launch.run(who_am_i, **request)  # type: ignore[arg-type]


def test_processes_of_torchrun_do_not_each_simulate_the_whole_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(launch.SetupError, match="each would simulate all 2 ranks"):
        launch.run(dist.get_rank, 2, backend="sim")
    with pytest.raises(launch.SetupError, match="leave torchrun out"):
        launch.simulate(dist.get_rank, 2)
    monkeypatch.setenv("WORLD_SIZE", "1")  # a batch system may set this for any process
    assert launch.run(dist.get_rank, 2, backend="sim") == [0, 1]
