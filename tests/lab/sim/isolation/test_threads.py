"""A rank's threads wait in virtual time and share the rank's state."""

import asyncio
import gc
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distlab.sim import RankError, simulate


def in_thread(call: Callable[[], object], **settings: Any) -> object:
    """Make a call in a new thread, and return its result."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()), **settings)
    thread.start()
    thread.join()
    return results[0]


# Time


def computes_beside_a_heartbeat() -> list[float]:
    beats: list[float] = []
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(1.0):
            beats.append(round(time.monotonic(), 6))

    thread = threading.Thread(target=beat)
    thread.start()
    weight = torch.ones(4096, 4096, device="meta")
    while time.monotonic() < 3.5:
        for _ in range(10):
            weight @ weight
    is_over.set()
    thread.join()
    return beats


def test_a_heartbeat_beats_while_the_rank_computes() -> None:
    [beats] = simulate(computes_beside_a_heartbeat, 1, cluster="dgx-h100").results
    assert beats == pytest.approx([1.0, 2.0, 3.0], abs=1e-3)


# Waiting


def test_a_lock_is_given_on_in_virtual_time() -> None:
    def program() -> list[tuple[int, float]]:
        lock, taken = threading.Lock(), list[tuple[int, float]]()

        def take(number: int) -> None:
            with lock:
                taken.append((number, round(time.monotonic(), 6)))
                time.sleep(1.0)

        threads = [threading.Thread(target=take, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return taken

    assert simulate(program, 2).results == [[(0, 0.0), (1, 1.0), (2, 2.0)]] * 2


def tries_a_lock() -> list[object]:
    lock = threading.Lock()
    with lock:
        blocked = in_thread(lambda: lock.acquire(False)), in_thread(lambda: lock.acquire(timeout=2))
        was_locked = lock.locked()
    return [*blocked, was_locked, lock.locked(), round(time.monotonic(), 3)]


def test_a_lock_can_be_tried() -> None:
    assert simulate(tries_a_lock, 1).results == [[False, False, True, False, 2.0]]


def uses_a_reentrant_lock() -> list[object]:
    lock = threading.RLock()
    with lock, lock:
        other = in_thread(lambda: lock.acquire(timeout=0.5))
    with pytest.raises(RuntimeError, match="un-acquired"):
        lock.release()
    return [other, in_thread(lambda: lock.acquire(timeout=0.5))]


def test_a_reentrant_lock_is_its_owners() -> None:
    assert simulate(uses_a_reentrant_lock, 1).results == [[False, True]]


async def reduces_in_a_thread() -> float:
    x = torch.ones(1)
    await asyncio.to_thread(dist.all_reduce, x)
    await asyncio.sleep(2.0)
    return x.item()


def test_asyncio_waits_for_threads() -> None:
    def program() -> tuple[float, float]:
        return asyncio.run(reduces_in_a_thread()), time.monotonic()

    for total, now_s in simulate(program, 3).results:
        assert total == 3
        assert now_s == pytest.approx(2.0, abs=0.01)


class StartsAnother(threading.Thread):
    """A thread that starts another while it starts, as a destructor may at any moment."""

    @property
    def _bootstrap(self) -> Callable[[], None]:
        threading.Thread(target=int).start()
        return super()._bootstrap  # type: ignore[misc, no-any-return]


def test_a_thread_may_start_while_another_does() -> None:
    def starts_several() -> None:
        for _ in range(20):
            thread = StartsAnother(target=int)
            thread.start()
            thread.join()

    simulate(starts_several, 2)


# The rank's state


def looks_around() -> list[object]:
    total = functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)  # finds the group by name
    return [dist.get_rank(), os.environ["RANK"], dist.get_world_size(), total.item()]


def test_a_thread_is_in_its_ranks_world() -> None:
    results = simulate(lambda: in_thread(looks_around), 3).results
    assert results == [[rank, str(rank), 3, 3.0] for rank in range(3)]


def test_memory_and_time_of_a_thread_are_its_ranks() -> None:
    def train() -> None:
        model = nn.Linear(8, 8)
        model(torch.ones(4, 8)).sum().backward()

    simulated = simulate(lambda: in_thread(train), 2, cluster="dgx-h100")
    assert min(simulated.trace.peak_bytes) > 8 * 8 * 4
    assert min(simulated.flops) > 0


# Ends


def test_what_a_thread_raises_ends_the_thread_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Restore Python's own hook, which pytest has replaced.
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)

    def fail() -> None:
        raise ZeroDivisionError("in a thread")

    def program() -> str:
        thread = threading.Thread(target=fail, name="unlucky")
        thread.start()
        thread.join()
        dist.barrier()
        return "went on"

    assert simulate(program, 2).results == ["went on"] * 2
    shown = capsys.readouterr().err
    assert shown.count("Exception in thread unlucky") == 2
    assert "ZeroDivisionError: in a thread" in shown
    assert "threads.py" not in shown.replace("test_threads.py", "").replace("threading.py", "")


def test_a_daemon_ends_with_its_rank() -> None:
    beats: list[float] = []

    def beat() -> None:
        while True:
            time.sleep(1.0)
            beats.append(time.monotonic())

    def program() -> None:
        threading.Thread(target=beat, daemon=True).start()
        time.sleep(3.5)

    assert simulate(program, 1).seconds == pytest.approx(3.5)
    assert len(beats) == 3


def test_threads_of_a_failed_world_leave_nothing_behind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = threading.active_count()

    def program() -> None:
        pool = ThreadPoolExecutor(2)
        condition = threading.Condition()

        def wait_for_ever() -> None:
            with condition:
                condition.wait()

        pool.submit(wait_for_ever)
        time.sleep(1.0)
        if dist.get_rank() == 1:
            raise ValueError("no")
        dist.barrier()

    with pytest.raises(RankError, match="rank 1 of 2 raised ValueError: no"):
        simulate(program, 2)
    for _ in range(100):
        if threading.active_count() == before:
            break
        time.sleep(0.01)
    assert threading.active_count() == before
    assert capsys.readouterr().err == ""


def test_locks_of_a_world_work_after_its_end() -> None:
    made: list[Any] = []

    def program() -> None:
        made.extend((threading.Lock(), threading.RLock(), threading.Condition(), queue.Queue()))

    simulate(program, 1)
    for lock in made[:3]:
        with lock:
            pass
    made[3].put(1)
    assert made[3].get(timeout=1) == 1
    assert not isinstance(threading.Lock(), type(made[0]))


# Processes of a rank


class Clocked(Dataset[float]):
    """A data set whose items are the current time in the process that loads them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return time.monotonic()


def loads_in_a_process(began_s: float) -> list[int]:
    seen = []
    for batch in DataLoader(Clocked(), batch_size=2, num_workers=1):
        seen.append(len(batch))
        dist.barrier()
        assert batch.min().item() >= began_s, "not the virtual time of the rank"
    return seen


def test_a_data_loaders_process_lives_in_real_time() -> None:
    assert simulate(loads_in_a_process, 2, time.monotonic()).results == [[2, 2]] * 2


def keeps_its_loader() -> None:
    loader: Any = DataLoader(Clocked(), batch_size=2, num_workers=1, persistent_workers=True)
    loader.itself = loader  # so that only the collector frees it
    assert len(list(loader)) == 2


def test_a_loaders_process_that_a_rank_leaves_behind_ends_when_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_late, join = [], BaseProcess.join

    def noted(process: BaseProcess, timeout: float | None = None) -> None:
        join(process, timeout)
        is_late.append(process.is_alive())

    monkeypatch.setattr(BaseProcess, "join", noted)
    simulate(keeps_its_loader, 2)
    gc.collect()
    assert is_late == [False, False], "torch waits 5 s for a process, and then kills it"
