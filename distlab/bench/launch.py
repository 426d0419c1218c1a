"""Measure the time to start a gloo world, do nothing, and end it."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from distlab import launch
from distlab.bench import harness
from distlab.launch import fork_server
from distlab.util.text import counted

WARM = "launch.run, fork server running (warm)"
COLD = "launch.run, first call (cold)"
SPAWN = "torch.multiprocessing.spawn"
SLOW_REPEATS = 3  # number of rounds for contestants that take seconds


def print_table(ranks: int, repeats: int) -> None:
    """Print the launch times, in seconds and as multiples of the warm start."""
    warm = {WARM: partial(launch.run, dist.get_rank, ranks, backend="gloo")}
    slow: dict[str, Callable[[], object]] = {
        COLD: partial(_cold, ranks),
        SPAWN: partial(_spawn, ranks),
    }
    rounds = min(repeats, SLOW_REPEATS)
    launch.run(dist.get_rank, ranks, backend="gloo")  # starts the fork server
    seconds = {
        WARM: harness.in_turns(warm, repeats)[0].tolist(),
        **dict(zip(slow, harness.in_turns(slow, rounds).tolist(), strict=True)),
    }
    base = median(seconds[WARM])
    rows = [
        (name, f"{median(s):.2f}", f"{min(s):.2f} … {max(s):.2f}", f"{median(s) / base:.1f}")
        for name, s in seconds.items()
    ]
    headings = ("", "median s", "min … max s", "times warm")
    harness.print_table(counted(ranks, "gloo rank"), headings, rows)


def _cold(ranks: int) -> None:
    fork_server.close_idle()
    launch.run(dist.get_rank, ranks, backend="gloo")


def _spawn(ranks: int) -> None:
    """Start the same world with torch's own launcher."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        spawn(_spawned_rank, (rendezvous, ranks), nprocs=ranks)  # type: ignore[no-untyped-call]


def _spawned_rank(rank: int, rendezvous: str, world_size: int) -> None:
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    dist.barrier()  # waits for ranks that may still be connecting
    dist.destroy_process_group()
