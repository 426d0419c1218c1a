"""Ranks that ask the store again and again, and what reports say about its keys."""

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from distlab.sim import Deadlock, simulate
from distlab.sim.messages import store as messages_store


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def waits_for_a_value() -> None:
    if dist.get_rank() == 0:
        store().set("phase", "warm-up")
    while store().get("phase") != b"training":
        pass


def report(fn: Callable[[], None]) -> str:
    with pytest.raises(Deadlock) as caught:
        simulate(fn, 3)
    assert caught.value.kind == "key never set"
    return str(caught.value)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test asks as often as it takes: seconds."""
    monkeypatch.setattr(messages_store, "MAX_ANSWERS", 2000)


@pytest.mark.usefixtures("impatient")
def test_a_value_that_stays_as_it_is() -> None:
    assert "'phase', which stays 'warm-up': rank 0 was the last to set it" in report(
        waits_for_a_value
    )


def test_who_asks_until_the_answer_comes_gets_it() -> None:
    def program() -> int:
        counter, number = store(), dist.get_rank()
        if number == 0:
            for _ in range(3):
                dist.barrier()
        else:
            for _ in range(3):
                dist.barrier()
            counter.add("arrived", 1)
        while counter.add("arrived", 0) < 2:
            pass
        return int(counter.get("arrived"))

    assert simulate(program, 3).results == [2, 2, 2]


def test_reading_many_keys_is_no_waiting() -> None:
    def program() -> int:
        counter = store()
        if dist.get_rank():
            dist.barrier()
            return 0
        for key in range(12_000):
            counter.set(f"{key}", f"{key}")
        total = sum(int(counter.get(f"{key}")) for key in range(12_000))
        dist.barrier()
        return total

    assert simulate(program, 2).results == [sum(range(12_000)), 0]


def test_the_method_that_waits_is_named() -> None:
    def gets() -> None:
        dist.PrefixStore("run", store()).get("config")

    assert "store.get for 'run/config'" in report(gets)

    def waits() -> None:
        store().wait(["config"], timedelta(seconds=1))

    with pytest.raises(Exception, match="config"):
        simulate(waits, 2)


def waits_for_a_lock() -> None:
    lock, me = store(), str(dist.get_rank() + 1)
    while lock.compare_set("lock", "0" if dist.get_rank() else "", me) != me.encode():
        pass


@pytest.mark.usefixtures("impatient")
def test_a_lock_that_is_never_released() -> None:
    text = report(waits_for_a_lock)
    assert "ranks 1 and 2 wait for the key 'lock', which stays 1: rank 0 was the last to" in text


def reads_a_limit_in_every_step() -> int:
    total = 0
    if dist.get_rank() == 0:
        store().set("limit", "7")
        for _ in range(12_000):
            total += int(store().get("limit")) + store().add("extra", 0)
    dist.barrier()
    return total


def test_reading_a_key_often_is_no_waiting() -> None:
    assert simulate(reads_a_limit_in_every_step, 2).results == [84_000, 0]


def reads_a_key_that_is_deleted_and_set_again() -> bytes:
    if dist.get_rank() == 0:
        store().set("k", "v")
        dist.barrier()
        time.sleep(0.0005)
        store().delete_key("k")
        time.sleep(1)
        store().set("k", "w")
        return b"w"
    dist.barrier()
    value = store().get("k")
    while value == b"v":
        value = store().get("k")
    return value


def test_who_reads_a_key_that_is_deleted_waits_for_it() -> None:
    assert simulate(reads_a_key_that_is_deleted_and_set_again, 2).results == [b"w", b"w"]


def asks_for_two_keys_in_turn() -> bool:
    if dist.get_rank() == 0:
        store().set("a", "0")
        store().set("b", "0")
        dist.barrier()
        time.sleep(0.01)
        store().set("b", "1")
    else:
        dist.barrier()
        while not (store().get("a") == b"1" or store().get("b") == b"1"):
            pass
    return True


def test_two_keys_may_be_asked_for_in_turn() -> None:
    assert simulate(asks_for_two_keys_in_turn, 2).results == [True, True]
