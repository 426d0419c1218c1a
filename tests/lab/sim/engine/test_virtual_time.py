"""Clocks and sleep are virtual in a rank, and polling makes virtual time pass."""

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from programs import me

from distlab.sim import Deadlock, RankError, simulate

real_clock = time.perf_counter


def reads_clocks() -> list[float]:
    time.sleep(3600.0 * (1 + me()))
    return [
        time.perf_counter(),
        time.monotonic(),
        time.time(),
        time.perf_counter_ns() / 1e9,
        time.monotonic_ns() / 1e9,
        time.time_ns() / 1e9,
    ]


def test_clocks_and_sleep_are_virtual_in_a_rank() -> None:
    start = real_clock()
    simulated = simulate(reads_clocks, 3)
    assert real_clock() - start < 60
    for rank, readings in enumerate(simulated.results):
        assert readings[0] == 3600.0 * (1 + rank)
        assert readings == pytest.approx([readings[0]] * 6, abs=1e-8), "of one tick each"
    assert simulated.seconds == 10800.0


def test_no_rank_sleeps_back_in_time() -> None:
    with pytest.raises(RankError, match="ValueError"):
        simulate(lambda: time.sleep(-1.0), 1)


LATE_S = 0.012  # longer than MAX_POLLS polls, which take a microsecond each


def polls_a_request() -> float:
    if me() == 0:
        x = torch.zeros(1)
        work = dist.irecv(x, 1)
        while not work.is_completed():
            pass
    else:
        time.sleep(LATE_S)
        dist.send(torch.ones(1), 0)
    return time.perf_counter()


def polls_the_store() -> float:
    store = c10d._get_default_store()
    if me() == 0:
        while not store.check(["there"]):
            pass
    else:
        time.sleep(LATE_S)
        store.set("there", "")
    return time.perf_counter()


def sleeps_until_something_is_there() -> float:
    if me() == 0:
        while not hasattr(os, "_there"):
            time.sleep(1e-5)
    else:
        time.sleep(LATE_S)
        os._there = True  # type: ignore[attr-defined]  # like a file
    return time.perf_counter()


@pytest.mark.parametrize(
    "program", [polls_a_request, polls_the_store, sleeps_until_something_is_there]
)
def test_who_asks_again_and_again_lets_the_others_get_on(program: Callable[[], float]) -> None:
    try:
        waiting, _ = simulate(program, 2).results
    finally:
        vars(os).pop("_there", None)
    assert LATE_S <= waiting < 1.2 * LATE_S


def sleeps_until(limit_s: float, pauses: list[int]) -> float:
    """Until ``limit_s``, poll every millisecond for a message that never comes; return the time."""
    work = dist.irecv(torch.zeros(1), 1 - me())
    while not work.is_completed() and time.perf_counter() < limit_s:
        pauses[me()] += 1
        time.sleep(0.001)
    return time.perf_counter()


def test_half_an_hour_of_short_sleeps_in_vain_takes_few_of_them() -> None:
    pauses = [0, 0]
    with pytest.raises(Deadlock, match="waits for rank"):
        simulate(sleeps_until, 2, 1e9, pauses)
    assert max(pauses) < 12_000  # at a millisecond each, a single hour would take 3,600,000


def uses_the_store() -> list[object]:
    store = c10d.PrefixStore("mine", c10d._get_default_store())
    count = store.add("count", me() + 1)
    dist.barrier()
    won = store.compare_set("winner", "", str(me()))
    if me() == 0:
        time.sleep(1.0)
        store.set("late", "text")
    store.wait(["late"])
    results = [count, store.get("count"), won, store.get("late"), time.perf_counter() >= 1.0]
    dist.barrier()
    deleted = store.delete_key("late") if me() == 0 else None
    dist.barrier()
    return [*results, deleted, store.check(["late"]), store.num_keys()]


def test_the_store_counts_waits_and_tells_who_came_first() -> None:
    assert simulate(uses_the_store, 3).results == [
        [count, b"6", b"0", b"text", True, deleted, False, 2]
        for count, deleted in ((1, True), (3, None), (6, None))
    ]
