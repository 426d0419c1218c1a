"""Measure the simulator's own speed: real seconds for messages, collectives and idle ranks."""

import gc
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist

from distlab.bench import harness
from distlab.sim import Options, simulate
from distlab.sim.isolation.host import hand_over_s, one_core
from distlab.util.text import bytes_text, seconds_text

RING_RANKS = 256
MANY_RANKS = 1024
HEADINGS = ("", "real s", "memory", "messages", "µs each", "simulated s")


def print_table() -> None:
    """Measure the simulator, and print the table."""
    simulate(_nothing, 2)  # keeps imports and first allocations out of the figures
    rows = (
        _row(f"{MANY_RANKS:,} idle ranks", _nothing, MANY_RANKS),
        _row(f"ring by hand, {RING_RANKS} ranks", _ring, RING_RANKS),
        _row("the same, only counted", _ring, RING_RANKS, Options(has_events=False)),
        _row(f"all_reduce, {MANY_RANKS:,} ranks", _built_in, MANY_RANKS),
    )
    with one_core():
        on_one_core = seconds_text(hand_over_s())
    harness.print_table(
        "",
        HEADINGS,
        rows,
        "Ring by hand: an all-reduce by isend and recv. all_reduce: the built-in one.",
        "To hand over from one thread to another takes "
        f"{seconds_text(hand_over_s())} here, {on_one_core} on one core.",
        "The whole process, torch included, now holds "
        f"{bytes_text(psutil.Process().memory_info().rss)}.",
    )


def _row(
    name: str, program: Callable[[], object], ranks: int, options: Options | None = None
) -> tuple[str, ...]:
    gc.collect()
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()
    simulated = simulate(program, ranks, options=options)
    seconds = time.perf_counter() - start
    grown = psutil.Process().memory_info().rss - before
    sent = sum(simulated.trace.messages)
    per_message = f"{seconds / sent * 1e6:.1f}" if sent else ""
    numbers = (f"{sent:,}", per_message, f"{simulated.seconds:.6f}")
    return name, f"{seconds:.2f}", bytes_text(grown), *numbers


def _nothing() -> None:
    """Do nothing on a rank."""


def _built_in() -> None:
    dist.all_reduce(torch.ones(4))


def _ring() -> None:
    """Sum over all ranks; each rank sends 2(N-1) messages of one chunk."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = list(torch.ones(4 * size).tensor_split(size))
    inbox = torch.empty_like(chunks[0])
    for step in range(size - 1):
        arriving = chunks[(rank - step - 1) % size]
        _swap(chunks[(rank - step) % size], right, inbox, left)
        arriving += inbox
    for step in range(size - 1):
        _swap(chunks[(rank - step + 1) % size], right, chunks[(rank - step) % size], left)


def _swap(outgoing: torch.Tensor, dst: int, incoming: torch.Tensor, src: int) -> None:
    send = dist.isend(outgoing, dst)
    dist.recv(incoming, src)
    if send is not None:
        send.wait()
