"""The program that the tests run under mpirun: ``mpi_ranks.py WORLD_SIZE OUTPUT``.

Rank 0 writes the results of all ranks to OUTPUT.
"""

import gc
import pickle
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import programs
import psutil
import torch
import torch.distributed as dist

from distlab import launch
from distlab.process_group.base import BaseGroup

GLOO_ONLY = {"monitored_barrier"}  # torch rejects these calls on any other backend
TRAINED_ON = 4


def all_of_it() -> dict[str, object]:
    """Run, in one world, everything that does not end the job; return the results by name."""
    warnings.simplefilter("ignore")
    calls = {
        name: programs.without_leftovers(program)
        for name, program in programs.CALLS.items()
        if name not in GLOO_ONLY
    }
    return {
        "calls": calls,
        "trainings": trainings_of_torch(),
        "counts": counts_of_a_known_program(),
        "forgotten": sends_that_nobody_waits_for(),
        "refusals": what_is_refused(),
        "disagreements": what_ranks_disagree_on(),
        "store listens on": where_the_store_listens(),
    }


def where_the_store_listens() -> list[str]:
    """Return the addresses on which this process listens at the default store's port."""
    store: Any = dist.distributed_c10d._get_default_store()
    port = store.underlying_store.port
    sockets = psutil.Process().net_connections("inet")
    return [
        socket.laddr.ip
        for socket in sockets
        if socket.status == psutil.CONN_LISTEN and socket.laddr.port == port
    ]


def trainings_of_torch() -> dict[str, object]:
    import trainings  # imported only here, because loading FSDP and pipelines takes seconds

    return trainings.all_trainings()


def counts_of_a_known_program() -> tuple[dict[str, int], dict[str, int]]:
    group = dist.new_group()
    assert isinstance(group, BaseGroup)
    for size in (10, 100):
        dist.all_reduce(torch.zeros(size), group=group)
    dist.broadcast(torch.zeros(3, dtype=torch.float64), 0, group)
    dist.all_gather_into_tensor(torch.zeros(2 * dist.get_world_size()), torch.zeros(2), group)
    return dict(group.counts.calls), dict(group.counts.num_bytes)


def sends_that_nobody_waits_for() -> list[float]:
    """Return the values received from a rank that dropped its tensors right after isend."""
    right, left = programs.neighbours()
    for k in range(100):
        dist.isend(torch.full((20_000,), float(k)), right)
    gc.collect()
    torch.full((2_000_000,), -1.0)  # overwrites freed memory
    arrived = [torch.zeros(20_000) for _ in range(100)]
    for x in arrived:
        dist.recv(x, left)
    return [x.mean().item() for x in arrived]


def what_is_refused() -> list[str]:
    x = torch.zeros(2, 2)
    return [
        programs.refusal(call)
        for call in (
            lambda: dist.all_reduce(x.to("meta")),
            lambda: dist.all_reduce(x.to_sparse()),
            lambda: dist.all_gather([x[:, 0]] * dist.get_world_size(), x[:, 0]),
            lambda: dist.all_reduce(x.int(), dist.ReduceOp.AVG),
            lambda: dist.all_reduce(x.short()),
        )
    ]


def what_ranks_disagree_on() -> dict[str, str]:
    """Make ranks 0 and 1 disagree in several ways, each in a new group; return the errors."""
    attempts: dict[str, Callable[[dist.ProcessGroup, int], object]] = {
        "size": lambda group, rank: dist.all_reduce(torch.zeros(4 + rank), group=group),
        "dtype": lambda group, rank: dist.all_reduce(torch.zeros(4).to(KINDS[rank]), group=group),
        "longer": lambda group, rank: message(3, 2, group, rank),
        "shorter": lambda group, rank: message(3, 4, group, rank),
        "parts": lambda group, rank: dist.all_to_all_single(
            torch.zeros(4), torch.zeros(4), [2, 2], [2 - rank, 2 + rank], group
        ),
        "time": lambda group, rank: None if rank else late(group),
    }
    said = {}
    for name, attempt in attempts.items():
        group = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            said[name] = programs.refusal(lambda: attempt(group, dist.get_rank()))  # noqa: B023
        dist.barrier()
    return said


KINDS = (torch.float32, torch.int32)


def message(sent: int, expected: int, group: dist.ProcessGroup, rank: int) -> None:
    if rank == 0:
        dist.send(torch.zeros(sent), 1, group)
    else:
        dist.recv(torch.zeros(expected), 0, group)


def late(group: dist.ProcessGroup) -> None:
    work = dist.irecv(torch.zeros(1), 1, group)
    assert work is not None
    work.wait(timedelta(seconds=0.2))


def main(world_size: int, output: Path) -> None:
    results = launch.run(all_of_it, world_size)  # the default backend, "auto", selects mpi here
    again = launch.run(dist.get_rank, world_size, backend="mpi")
    if dist.get_rank() == 0:
        output.write_bytes(pickle.dumps((results, again)))


if __name__ == "__main__":
    gc.freeze()  # otherwise, the collection at exit would spend 0.4 s searching all of torch
    main(int(sys.argv[1]), Path(sys.argv[2]))
