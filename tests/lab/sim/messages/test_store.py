"""Ranks that poll the store, and how deadlock reports describe the keys they wait for."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from distlab.sim import Deadlock, simulate
from distlab.sim.messages import store as messages_store


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def report(fn: Callable[[], None]) -> str:
    with pytest.raises(Deadlock) as caught:
        simulate(fn, 3)
    assert caught.value.kind == "key never set"
    return str(caught.value)


def waits_for_a_value() -> None:
    if dist.get_rank() == 0:
        store().set("phase", "warm-up")
    while store().get("phase") != b"training":
        pass


def waits_for_a_lock() -> None:
    lock, me = store(), str(dist.get_rank() + 1)
    while lock.compare_set("lock", "0" if dist.get_rank() else "", me) != me.encode():
        pass


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (waits_for_a_value, "'phase', which stays 'warm-up': rank 0 was the last to set it"),
        (
            waits_for_a_lock,
            "ranks 1 and 2 wait for the key 'lock', which stays 1: rank 0 was the last to",
        ),
        (lambda: dist.PrefixStore("run", store()).get("config"), "store.get for 'run/config'"),
    ],
)
def test_a_key_that_never_changes(
    program: Callable[[], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_store, "MAX_ANSWERS", 2000)  # otherwise, polling takes seconds
    assert words in report(program)


def reads_many_keys() -> int:
    total = 0
    if dist.get_rank() == 0:
        for key in range(12_000):
            store().set(f"{key}", f"{key}")
        total = sum(int(store().get(f"{key}")) for key in range(12_000))
    dist.barrier()
    return total


def reads_a_limit_in_every_step() -> int:
    total = 0
    if dist.get_rank() == 0:
        store().set("limit", "7")
        for _ in range(12_000):
            total += int(store().get("limit")) + store().add("extra", 0)
    dist.barrier()
    return total


@pytest.mark.parametrize(
    ("program", "total"),
    [(reads_many_keys, sum(range(12_000))), (reads_a_limit_in_every_step, 84_000)],
)
def test_reading_is_no_waiting(program: Callable[[], int], total: int) -> None:
    assert simulate(program, 2).results == [total, 0]


def met_at_a_port(path: str) -> bytes:
    own = dist.TCPStore("localhost", 29_700, dist.get_world_size(), dist.get_rank() == 0)
    own.set(f"from {dist.get_rank()}", "tcp")
    later = dist.TCPStore("localhost", 29_701, wait_for_workers=False)
    later.set("now", f"{own.port}")
    return own.get("from 2") + later.get("now")


def met_in_a_file(path: str) -> bytes:
    own = dist.FileStore(path, dist.get_world_size())
    own.set(f"from {dist.get_rank()}", "file")
    return own.get("from 2")


def met_nobody(path: str) -> bytes:
    own = dist.HashStore()
    assert isinstance(own, dist.Store)
    assert not isinstance(own, dist.TCPStore)
    return b"%d" % own.add("count", 1)


@pytest.mark.parametrize(
    ("program", "value"),
    [(met_at_a_port, b"tcp29700"), (met_in_a_file, b"file"), (met_nobody, b"1")],
)
def test_stores_of_the_program_are_simulated(
    program: Callable[[str], bytes], value: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "store"
    assert simulate(program, 3, str(file)).results == [value] * 3
    assert not file.exists()


def asks_its_own_store() -> None:
    dist.TCPStore("localhost", 29_700, wait_for_workers=False).get("nothing")


def test_a_key_of_an_own_store_that_no_rank_sets() -> None:
    assert "store.get for 'nothing'" in report(asks_its_own_store)


def test_outside_a_world_the_stores_are_torchs() -> None:
    real = dist.HashStore
    simulate(met_nobody, 1, "")
    assert dist.HashStore is real
