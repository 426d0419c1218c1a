"""Pools of processes, whose own threads live in real time as the processes do."""

import contextlib
import multiprocessing
import multiprocessing.pool
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed, wait

import pytest
import torch.distributed as dist

from distlab.sim import RankError, Session, simulate

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*multi-threaded, use of fork:DeprecationWarning",
    "ignore:unclosed running multiprocessing pool:ResourceWarning",
)
FORK = multiprocessing.get_context("fork")
KEPT: list[object] = []


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    before = {*threading.enumerate()}
    yield
    KEPT.clear()
    assert multiprocessing.active_children() == []
    assert {*threading.enumerate()} <= before


def doubled(x: int) -> int:
    return 2 * x


def fails(x: int) -> int:
    raise ValueError(f"wrong {x}")


def sleeps(_: int) -> None:
    time.sleep(1e6)


def maps() -> list[int]:
    with FORK.Pool(2) as pool:
        dist.barrier()
        return pool.map(doubled, [1, dist.get_rank()])


def maps_one_by_one() -> list[int]:
    with FORK.Pool(2) as pool:
        return sorted(pool.imap_unordered(doubled, [1, dist.get_rank()]), reverse=True)


def gets_in_time() -> list[int]:
    with FORK.Pool(1) as pool:
        results = [pool.apply_async(doubled, (x,)) for x in (1, dist.get_rank())]
        pool.close()
        pool.join()
        return [result.get(timeout=60) for result in results]


def executes() -> list[int]:
    with ProcessPoolExecutor(2, mp_context=FORK) as pool:
        dist.barrier()
        return list(pool.map(doubled, [1, dist.get_rank()], timeout=60))


def awaits_futures() -> list[int]:
    with ProcessPoolExecutor(2, mp_context=FORK) as pool:
        futures = [pool.submit(doubled, x) for x in (1, dist.get_rank())]
        assert {*as_completed(futures)} == {*futures}
        assert wait([pool.submit(doubled, 0)]).not_done == set()
        return [future.result() for future in futures]


def has_threads_as_well() -> list[int]:
    items = queue.Queue[int]()
    with FORK.Pool(1) as pool, ThreadPoolExecutor(1) as threads:
        begin_s = time.monotonic()
        threads.submit(lambda: (time.sleep(100.0), items.put(2)))
        first = items.get()
        assert time.monotonic() - begin_s >= 100.0
        return [first, pool.apply(doubled, (dist.get_rank(),))]


def awaits_threads_and_processes() -> list[int]:
    with ThreadPoolExecutor(1) as threads, ProcessPoolExecutor(1, mp_context=FORK) as pool:
        futures = [threads.submit(time.sleep, 1), pool.submit(doubled, dist.get_rank())]
        assert wait(futures).not_done == set()
        return [2, futures[1].result()]


@pytest.mark.parametrize(
    "program",
    [
        *(maps, maps_one_by_one, gets_in_time, executes),
        *(awaits_futures, has_threads_as_well, awaits_threads_and_processes),
    ],
)
def test_a_rank_waits_for_its_pool(program: Callable[[], list[int]]) -> None:
    result = [sorted(values) for values in simulate(program, 3).results]
    assert result == [[0, 2], [2, 2], [2, 4]]


def fails_in_a_pool() -> None:
    with FORK.Pool(1) as pool:
        pool.map(fails, [1])


def fails_in_an_executor() -> None:
    with ProcessPoolExecutor(1, mp_context=FORK) as pool:
        pool.submit(fails, 1).result()


@pytest.mark.parametrize("program", [fails_in_a_pool, fails_in_an_executor])
def test_an_error_in_a_pool_is_the_ranks(program: Callable[[], None]) -> None:
    with pytest.raises(RankError, match="ValueError: wrong 1"):
        simulate(program, 2)


def gives_up() -> None:
    with FORK.Pool(1) as pool, pytest.raises(multiprocessing.TimeoutError):
        pool.apply_async(sleeps, (1,)).get(timeout=0.1)


def test_a_timeout_of_a_pool_is_one_in_real_time() -> None:
    simulate(gives_up, 2)


def leaves_a_pool() -> None:
    KEPT.append(FORK.Pool(1))


def leaves_a_busy_pool() -> None:
    leaves_a_pool()
    KEPT[-1].apply_async(sleeps, (1,))  # type: ignore[attr-defined]


def leaves_an_executor() -> int:
    pool = ProcessPoolExecutor(1, mp_context=FORK)
    KEPT.append(pool)
    return pool.submit(os.getpid).result()


def leaves_a_busy_executor() -> None:
    leaves_an_executor()
    KEPT[-1].submit(sleeps, 1)  # type: ignore[attr-defined]


def leaves_one_at_an_error() -> None:
    leaves_a_busy_pool()
    leaves_a_busy_executor()
    raise ValueError("wrong")


@pytest.mark.parametrize(
    "program", [leaves_a_busy_pool, leaves_an_executor, leaves_a_busy_executor]
)
def test_a_pool_that_a_rank_leaves_behind_ends(program: Callable[[], object]) -> None:
    simulate(program, 2)


def test_a_pool_that_a_rank_leaves_at_an_error_ends() -> None:
    with pytest.raises(RankError, match="ValueError: wrong"):
        simulate(leaves_one_at_an_error, 2)


def test_a_pool_works_in_later_runs_of_a_session_and_ends_with_it() -> None:
    pools: dict[int, tuple[multiprocessing.pool.Pool, ProcessPoolExecutor]] = {}

    def begin(rank: int) -> None:
        pools[rank] = FORK.Pool(1), ProcessPoolExecutor(1, mp_context=FORK)

    def work(rank: int) -> int:
        pool, executor = pools[rank]
        return pool.apply(abs, (-rank,)) + executor.submit(abs, -rank).result()

    with contextlib.closing(Session(2)) as session:
        session.run(begin)
        for _ in range(2):
            lap = session.run(work)
            assert lap.error is None
            assert lap.results == {0: 0, 1: 2}
