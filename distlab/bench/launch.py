"""How long a gloo world takes to start, do nothing and end."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn

from distlab import launch
from distlab.launch import fork_server
from distlab.util.text import counted

SPAWN_REPEATS = 3  # of seconds each


def print_table(ranks: int, repeats: int) -> None:
    """Measure and print; rows in seconds, and as multiples of the warm start."""
    cold = _seconds(lambda: _cold(ranks), min(repeats, SPAWN_REPEATS))
    warm = _seconds(lambda: launch.run(dist.get_rank, ranks, backend="gloo"), repeats)
    rival = _seconds(lambda: _spawn(ranks), min(repeats, SPAWN_REPEATS))
    base = statistics.median(warm)
    table = Table("", "median s", "min … max s", "times warm", title=counted(ranks, "gloo rank"))
    table.columns[0].no_wrap = True
    for name, seconds in (
        ("launch.run, fork server running (warm)", warm),
        ("launch.run, first call (cold)", cold),
        ("torch.multiprocessing.spawn", rival),
    ):
        middle = statistics.median(seconds)
        spread = f"{min(seconds):.2f} … {max(seconds):.2f}"
        table.add_row(name, f"{middle:.2f}", spread, f"{middle / base:.1f}")
    Console().print(table)


def _seconds(action: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return times


def _cold(ranks: int) -> None:
    fork_server.close_idle()
    launch.run(dist.get_rank, ranks, backend="gloo")


def _spawn(ranks: int) -> None:
    """The rival: the same world by torch's own launcher."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        spawn(_spawned_rank, (rendezvous, ranks), nprocs=ranks)  # type: ignore[no-untyped-call]


def _spawned_rank(rank: int, rendezvous: str, world_size: int) -> None:
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    dist.barrier()  # the others may still be connecting
    dist.destroy_process_group()
