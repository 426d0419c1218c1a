"""Loader processes: the images that they load, and how they end."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from picture_folders import CLASSES, of_folder, taken, write_pictures
from torch.utils.data import DataLoader

from distlab.production.datasets import open_data
from distlab.production.loading import Keys, evaluation_keys, loader_of

CPU = torch.device("cpu")
END_S = 300.0  # far longer than a busy machine needs


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"), CLASSES)


# --- batches for evaluation ----------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
@settings(max_examples=25, deadline=None)
@given(num_images=st.integers(1, 70), batch=st.integers(1, 40))
def test_each_test_image_comes_once(num_ranks: int, num_images: int, batch: int) -> None:
    parts = [evaluation_keys(num_images, batch, rank, num_ranks) for rank in range(num_ranks)]
    assert {len(part) for part in parts} == {-(-num_images // batch)}
    indices = Counter(index for part in parts for keys in part for _, index in keys)
    assert indices == Counter(range(num_images))
    for together in zip(*parts, strict=True):
        sizes = [len(keys) for keys in together]
        assert sum(sizes) <= batch
        assert max(sizes) - min(sizes) <= 1


# --- loading -------------------------------------------------------------------------------------


class Order:
    """A sampler of three batches, one of them empty."""

    epoch = 4

    def __iter__(self) -> Any:
        return iter([[0, 5], [], [6]])

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_image_of_an_epoch_is_the_same_in_any_process(pictures: Path, num_workers: int) -> None:
    config = of_folder(pictures, num_workers=num_workers)
    images = open_data(config).train
    before = torch.get_rng_state()
    batches = list(loader_of(images, Keys(Order()), config, CPU))
    assert torch.equal(torch.get_rng_state(), before)
    assert [tuple(x.shape) for x, _ in batches] == [(2, 3, 8, 8), (0, 3, 8, 8), (1, 3, 8, 8)]
    assert [labels.tolist() for _, labels in batches] == [[0, 1], [], [1]]
    expected = taken(config, [(4, 0), (4, 5), (4, 6)])
    assert torch.equal(torch.cat([x for x, _ in batches]), torch.stack(expected))


def test_a_loader_sees_where_an_epoch_begins_anew(pictures: Path) -> None:
    order = Order()
    config = of_folder(pictures, num_workers=1)
    loader = loader_of(open_data(config).train, Keys(order), config, CPU)
    first = torch.cat([x for x, _ in loader])
    order.epoch = 5
    second = torch.cat([x for x, _ in loader])
    del loader
    expected = taken(config, [(5, 0), (5, 5), (5, 6)])
    assert torch.equal(second, torch.stack(expected))
    assert not torch.equal(first, second)


# --- the processes -------------------------------------------------------------------------------


@pytest.fixture
def loader(pictures: Path) -> Iterator[DataLoader[Any]]:
    """A loader with two persistent worker processes."""
    config = of_folder(pictures, num_workers=2)
    made = loader_of(open_data(config).train, Keys(Order()), config, CPU, stays=True)
    yield made
    if made._iterator is not None:
        made._iterator._shutdown_workers()  # type: ignore[attr-defined]
        made._iterator = None  # pytest keeps the loader after the server has ended


def workers_of(loader: DataLoader[Any]) -> list[psutil.Process]:
    iterator: Any = iter(loader)
    return [psutil.Process(worker.pid) for worker in iterator._workers]


IMPORTS = """
import os, signal, sys, time
from multiprocessing import forkserver
from pathlib import Path
import torch
from picture_folders import of_folder
from distlab.production.world import STOPS
from test_production_loading import Order, loader_of, open_data, Keys, workers_of
"""
LOADER = """
    config = of_folder(Path(sys.argv[1]), num_workers=2)
    images = open_data(config).train
    loader = loader_of(images, Keys(Order()), config, torch.device("cpu"), stays=True)
"""


@contextmanager
def started(
    program: str, pictures: Path, folder: Path, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a program as torchrun starts a rank: in a new session, with its own process group."""
    (folder / "package").mkdir()
    (folder / "package" / "rank.py").write_text(
        f"{IMPORTS}if __name__ == '__main__':{LOADER}{program}", encoding="utf-8"
    )
    (folder / "package" / "__main__.py").write_text(
        f"{IMPORTS}if True:{LOADER}{program}", encoding="utf-8"
    )
    with subprocess.Popen(
        [sys.executable, "-m", *arguments, str(pictures)],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    ) as rank:
        try:
            yield rank
        finally:
            rank.kill()


ASKED = """
    for stop in STOPS:
        signal.signal(stop, lambda *_: None)
        os.killpg(0, stop)  # the server has just been started
    server = forkserver._forkserver._forkserver_pid
    batches = iter(loader)
    for stop in STOPS:
        os.killpg(0, stop)  # and those who load
    print(len(list(batches)), len(list(loader)))
    print(forkserver._forkserver._forkserver_pid == server, flush=True)
"""


def test_signals_to_the_group_do_not_end_who_loads(pictures: Path, tmp_path: Path) -> None:
    with started(ASKED, pictures, tmp_path, "package.rank") as rank:
        printed = rank.communicate(timeout=END_S)
    assert (rank.returncode, *printed) == (0, "3 3\nTrue\n", "")


SLEEPING = """
    workers = workers_of(loader)
    print(*[worker.pid for worker in [*workers, workers[0].parent()]], flush=True)
    time.sleep(999)
"""


def test_who_loads_ends_with_a_rank_that_is_killed(pictures: Path, tmp_path: Path) -> None:
    with started(SLEEPING, pictures, tmp_path, "package.rank") as rank:
        assert rank.stdout is not None
        pids = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(pids) == 3
    assert ended(pids, within_s=END_S), pids


def ended(pids: list[int], within_s: float) -> bool:
    """Return True if all processes end in time; zombies count as ended."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        if not any(map(is_alive, pids)):
            return True
        time.sleep(0.05)
    return False


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
