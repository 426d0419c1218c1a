"""Task 4.5 on real processes: a stopped or slow rank is noticed, and no other is blamed."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import end_fork_server

from phase4_production.given import Health
from solutions.phase4_production.fault_tolerance import Heartbeat, HeartbeatMonitor

NUM_RANKS, CULPRIT, FATAL_STEP = 3, 1, 10
TIMEOUT_S, END_S = 1.5, 60.0
STEP_S = 0.01
context = multiprocessing.get_context("forkserver")
# Preload torch, which each rank would otherwise have to import.
context.set_forkserver_preload(["solutions.phase4_production.fault_tolerance"])


@pytest.fixture(autouse=True, scope="module")
def no_fork_server_stays() -> Iterator[None]:
    yield
    end_fork_server()


def train(rank: int, port: int, meeting: Path, fate: int) -> None:
    """Train until the test ends.

    The culprit sends itself the signal ``fate``. If ``fate`` is 0, the culprit is slow instead.
    """
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=NUM_RANKS
    )
    heartbeat = Heartbeat(store, rank)
    for step in range(1_000_000):
        begun_s = time.monotonic()
        time.sleep(STEP_S)
        if rank == CULPRIT and step >= FATAL_STEP:
            if fate:
                os.kill(os.getpid(), fate)
            time.sleep(10 * STEP_S)
        heartbeat.beat(step, time.monotonic() - begun_s)
        dist.all_reduce(torch.ones(1))


@contextmanager
def training(fate: int, meeting: Path) -> Iterator[HeartbeatMonitor]:
    """Start the ranks and yield their monitor; kill the ranks at the end."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=END_S)
    )
    ranks: list[BaseProcess] = [
        context.Process(target=train, args=(rank, store.port, meeting, fate), daemon=True)
        for rank in range(NUM_RANKS)
    ]
    for process in ranks:
        process.start()
    try:
        while not all(store.check([f"heartbeat/{rank}"]) for rank in range(NUM_RANKS)):
            assert all(process.is_alive() for process in ranks)
            time.sleep(0.01)
        yield HeartbeatMonitor(store, NUM_RANKS, timeout_s=TIMEOUT_S)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def poll_until(
    monitor: HeartbeatMonitor, is_noticed: Callable[[list[Health]], bool]
) -> list[list[Health]]:
    """Poll the monitor until ``is_noticed`` returns True; return the results of all polls."""
    end_s, polls = time.monotonic() + END_S, [monitor.poll()]
    while not is_noticed(polls[-1]):
        assert time.monotonic() < end_s, polls[-1]
        time.sleep(0.02)
        polls.append(monitor.poll())
    return polls


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_noticed(tmp_path: Path) -> None:
    with training(signal.SIGSTOP, tmp_path / "meeting") as monitor:
        polls = poll_until(
            monitor, lambda ranks: all(rank.status in ("silent", "waiting") for rank in ranks)
        )
    silent = {rank.rank for ranks in polls for rank in ranks if rank.status == "silent"}
    assert silent == {CULPRIT}
    assert [rank.status for rank in polls[-1]] == ["waiting", "silent", "waiting"]
    assert polls[-1][CULPRIT].step == FATAL_STEP - 1


@pytest.mark.slow
def test_a_slow_rank_is_noticed(tmp_path: Path) -> None:
    with training(0, tmp_path / "meeting") as monitor:
        polls = poll_until(monitor, lambda ranks: ranks[CULPRIT].status == "slow")
    assert polls[-1][CULPRIT].step >= FATAL_STEP
