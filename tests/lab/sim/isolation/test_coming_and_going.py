"""Worlds leave nothing behind when they end, and scripts may join and leave them repeatedly."""

import contextlib
import gc
import os
import platform
import random
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from everything import a_bit_of_everything
from programs import me, neighbours, size

# Imported before a world is simulated, as in modules that are loaded early.
from torch.distributed import destroy_process_group, init_process_group, new_group

from distlab.sim import Deadlock, Mismatch, RankError, SimulationError, simulate

Program = Callable[[], Any]


CHANGED_OBJECTS: dict[str, Callable[[], object]] = {
    "torch's table of groups": lambda: c10d._world,
    "init_process_group": lambda: (dist.init_process_group, c10d.init_process_group),
    "new_group": lambda: (dist.new_group, c10d.new_group),
    "insides of c10d": lambda: (c10d.rendezvous, c10d._new_process_group_helper),
    "clocks": lambda: [getattr(time, name) for name in ("sleep", "time", "perf_counter_ns")],
    "name of the host": lambda: (socket.gethostname, platform.node, os.uname),
    "functions of random": lambda: (random.random, random.seed, random.shuffle),
    "functions of numpy": lambda: (np.random.rand, np.random.seed, np.random.shuffle),
    "os.environ": lambda: (os.environ._data, dict(os.environ)),  # type: ignore[attr-defined]
    "torch's generator": lambda: torch.get_rng_state().tolist(),
    "random's generator": random.getstate,
    "garbage collection": lambda: (gc.get_threshold(), gc.get_freeze_count()),
    "scheduling": lambda: getattr(os, "sched_getscheduler", lambda _: None)(0),
    "numpy's generator": lambda: np.random.get_state()[1].tolist(),
    "threads of torch": torch.get_num_threads,
    "default dtype": torch.get_default_dtype,
    "filters of warnings": lambda: [*warnings.filters],
    "how warnings are shown": lambda: (warnings.showwarning, vars(warnings)["_showwarnmsg_impl"]),
    "excepthook": lambda: sys.excepthook,
    "gradients": lambda: (torch.is_grad_enabled(), torch.autograd.is_multithreading_enabled()),
    "threads": lambda: {t.name for t in threading.enumerate() if t.name.startswith("rank")},
    "stack of new threads": threading.stack_size,
    "initialised": dist.is_initialized,
    "working folder": os.getcwd,
    "cores": lambda: getattr(os, "sched_getaffinity", lambda _: None)(0),
}


def changes_much() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    os.environ["MASTER_ADDR"] = "elsewhere"
    os.chdir("/")
    warnings.simplefilter("ignore")
    dist.new_group([0])
    a_bit_of_everything()


def changes_much_and_raises() -> None:
    changes_much()
    if me() == 1:
        raise ValueError("boom")
    dist.barrier()


def changes_much_and_deadlocks() -> None:
    changes_much()
    dist.recv(torch.zeros(1), neighbours()[1])


def changes_much_and_mismatches() -> None:
    changes_much()
    dist.all_reduce(torch.zeros(1 + me()))


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (changes_much, None),
        (changes_much_and_raises, RankError),
        (changes_much_and_deadlocks, Deadlock),
        (changes_much_and_mismatches, Mismatch),
    ],
    ids=["success", "error", "deadlock", "mismatch"],
)
def test_everything_that_was_changed_is_put_back(
    program: Program, error: type[SimulationError] | None
) -> None:
    before = {what: read() for what, read in CHANGED_OBJECTS.items()}
    num_threads = threading.active_count()
    with pytest.raises(error) if error else contextlib.nullcontext():
        simulate(program, 3)
    for what, read in CHANGED_OBJECTS.items():
        assert read() == before[what], what
    assert threading.active_count() == num_threads


def counts_to(bound: int) -> list[int]:
    gathered: list[Any] = [None] * size()
    dist.all_gather_object(gathered, bound * me())
    return gathered


def simulates() -> object:
    return simulate(counts_to, 2, 1).results


def test_worlds_are_not_nested() -> None:
    with pytest.raises(SimulationError, match="one world at a time"):
        simulate(simulates, 2)
    assert simulate(counts_to, 2, 1).results == [[0, 1]] * 2


def test_a_world_is_joined_without_what_torch_2_11_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(c10d, "_register_pg_in_world", raising=False)
    assert simulate(counts_to, 2, 1).results == [[0, 1]] * 2


def test_a_real_process_group_lives_on() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        real = dist.group.WORLD
        assert simulate(counts_to, 3, 1).results == [[0, 1, 2]] * 3
        assert dist.group.WORLD is real
        x = torch.ones(1)
        dist.all_reduce(x)
        assert (dist.get_backend(), x.item()) == ("gloo", 1.0)
    finally:
        dist.destroy_process_group()


def script(backend: str, *, imported_early: bool = False) -> list[object]:
    """Join, make a group, leave and rejoin, like a torchrun script; return what was observed."""
    before = dist.is_initialized()
    initialise = init_process_group if imported_early else dist.init_process_group
    make_group = new_group if imported_early else dist.new_group
    initialise(backend, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    x, y = torch.ones(1), torch.ones(1)
    dist.all_reduce(x)
    group = make_group([0, 1], backend="gloo")
    if me() < 2:
        dist.all_reduce(y, group=group)
    twice = ""
    try:
        initialise(backend)
    except ValueError as error:
        twice = str(error)
    destroy_process_group()
    middle = dist.is_initialized()
    initialise(backend)
    z = torch.ones(1)
    dist.all_reduce(z)
    return [before, x.item(), y.item(), twice, middle, z.item()]


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("imported_early", [False, True])
def test_a_script_joins_and_leaves_whatever_backend_it_names(
    backend: str, imported_early: bool
) -> None:
    results = simulate(
        lambda: script(backend, imported_early=imported_early), 3, joined=False
    ).results
    for rank, result in enumerate(results):
        twice = "trying to initialize the default process group twice"
        result[3] = str(result[3]).partition("!")[0]
        assert result == [False, 3.0, 2.0 if rank < 2 else 1.0, twice, False, 3.0]


def makes_other_groups_in_its_second_world() -> float:
    """Rejoin and make other groups; torch numbers these from 1 again, which reuses old names."""
    for pair in ([0, 1], [2, 3]):
        dist.new_group(pair)
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    groups = [dist.new_group(pair) for pair in ([0, 2], [1, 3])]
    x = torch.ones(1) * me()
    dist.all_reduce(x, group=groups[me() % 2])
    return x.item()


def test_groups_of_a_world_that_was_left_are_not_compared_with_new_ones() -> None:
    assert simulate(makes_other_groups_in_its_second_world, 4).results == [2.0, 4.0, 2.0, 4.0]


def test_who_has_not_joined_is_told_so() -> None:
    with pytest.raises(RankError, match="Default process group has not been initialized"):
        simulate(lambda: dist.all_reduce(torch.ones(1)), 2, joined=False)
