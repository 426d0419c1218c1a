"""Each rank has its own random numbers and environment."""

import os
import platform
import random
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from programs import me

from distlab.sim import Cluster, Options, simulate


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), np.random.rand()


def test_ranks_that_do_not_seed_draw_different_numbers_the_same_ones_every_time() -> None:
    first = simulate(draws, 4).results
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    assert simulate(draws, 4).results == first
    assert [len(set(column)) for column in zip(*first, strict=True)] == [4, 4, 4]
    assert simulate(draws, 4, options=Options(seed=1)).results != first


def seeds_on_some_ranks(*seeding: int) -> list[tuple[float, float, float]]:
    numbers = []
    for _ in range(3):
        if me() in seeding:
            torch.manual_seed(5)
            random.seed(5)
            np.random.seed(5)
        dist.barrier()
        numbers.append(draws())
        dist.barrier()
    return numbers


def test_seeding_one_rank_does_not_disturb_another() -> None:
    none, one, all_of_them = (
        simulate(seeds_on_some_ranks, 3, *seeding).results for seeding in ((), (1,), (0, 1, 2))
    )
    assert [one[0], one[2]] == [none[0], none[2]]
    assert one[1] == all_of_them[1] != none[1]
    assert all_of_them[0] == all_of_them[1] == all_of_them[2]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert one[1] == [draws()] * 3  # the same draws as in a separate process


def reads_environment() -> dict[str, str]:
    dist.barrier()
    return {
        name: os.environ[name] for name in sorted(os.environ) if name.endswith(("RANK", "SIZE"))
    }


def test_environment_is_that_of_torchrun() -> None:
    results = simulate(reads_environment, 12, cluster="dgx-h100").results
    for rank, variables in enumerate(results):
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank % 8,
            "GROUP_RANK": rank // 8,
            "ROLE_RANK": rank,
            "WORLD_SIZE": 12,
            "LOCAL_WORLD_SIZE": 8,
        }
        assert {name: int(variables[name]) for name in expected} == expected


def reads_host() -> list[str]:
    dist.barrier()
    names = {socket.gethostname(), platform.node(), os.uname().nodename}
    return [*names, os.environ["GROUP_RANK"], os.environ["LOCAL_WORLD_SIZE"]]


@pytest.mark.parametrize(
    ("numbering", "nodes"), [("block", [0, 0, 1, 1, 2]), ("cyclic", [0, 1, 2, 0, 1])]
)
def test_ranks_of_a_node_read_the_same_name_of_their_host(numbering: str, nodes: list[int]) -> None:
    cluster = Cluster(3, 2, numbering=numbering)
    results = simulate(reads_host, 5, cluster=cluster).results
    assert results == [[f"node{node}", f"{node}", "2"] for node in nodes]
    assert os.uname().nodename == socket.gethostname() != "node0"


def writes_environment() -> list[object]:
    os.environ["MINE"] = str(me())
    os.environ["MASTER_PORT"] = "29500"
    dist.barrier()
    return [
        os.environ["MINE"],
        os.getenv("MINE"),
        dict(os.environ)["MINE"],
        "MINE" in os.environ,
        len(os.environ) == len(list(os.environ)),
        os.environ.setdefault("MINE", "x"),
        os.environ.pop("MINE"),
        "MINE" in os.environ,
        os.environ.get("MINE", "none"),
        os.environ["MASTER_PORT"],
    ]


def test_a_variable_that_a_rank_sets_is_its_own_and_gone_afterwards() -> None:
    for rank, result in enumerate(simulate(writes_environment, 3).results):
        own = str(rank)
        assert result == [own, own, own, True, True, own, own, False, "none", "29500"]
    command = [sys.executable, "-c", "import os; print(os.getenv('MASTER_PORT'))"]
    inherited = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert inherited.strip() == str(os.environ.get("MASTER_PORT"))


def forks() -> str:
    dist.barrier()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, os.environ["RANK"].encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        return pipe.read()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_process_that_a_rank_forks_keeps_its_variables() -> None:
    assert simulate(forks, 3).results == ["0", "1", "2"]


def test_determinism_that_a_rank_asks_for_ends_with_the_simulation() -> None:
    simulate(lambda: torch.use_deterministic_algorithms(True), 2)
    assert not torch.are_deterministic_algorithms_enabled()
