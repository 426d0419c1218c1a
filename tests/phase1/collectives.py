"""Bodies for tasks 1.4 to 1.8."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phase1.calls import numbers, returned

NUM_ELEMENTS = 1000
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7, 2), (101,))
DTYPES = ("float32", "float64", "int64", "uint8", "bfloat16")
KINDS = [*((shape, "float32") for shape in SHAPES), *(((7, 2), dtype) for dtype in DTYPES)]
NUMBERS: dict[str, tuple[int, int, int | float]] = {  # odd numbers from … to, times a scale
    "float64": (2**49, 2**50, 2.0**-50),
    "float32": (2**20, 2**21, 2.0**-21),
    "bfloat16": (2**4, 2**5, 2.0**-5),
    "int64": (2**58, 2**59, 1),
    "uint8": (16, 32, 1),
}
SIZES_BYTES = (4_000, 40_000, 400_000, 4_000_000)


def tensors_of(rank: int) -> list[Tensor]:
    """Numbers that need the whole width of their dtype, and sum exactly in any order on 8 ranks."""
    made = []
    for shape, dtype in KINDS:
        generator = torch.Generator().manual_seed(100 * rank + len(made))
        low, high, scale = NUMBERS[dtype]
        odd = 2 * torch.randint(low // 2, high // 2, shape, generator=generator) + 1
        made.append(odd.to(getattr(torch, dtype)) * scale)
    return made


def plain(tensors: list[Tensor]) -> list[Any]:
    return [tensor.tolist() for tensor in tensors]


# 1.4


def exchange_round_the_ring(lesson: Any, step: int, group: Any = None) -> dict[str, list[float]]:
    """Send rank + 1 numbers to the right by ``step`` places; return what both tensors hold."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    src = (rank - step) % size
    outgoing, incoming = torch.full((rank + 1,), float(rank)), torch.full((src + 1,), -1.0)
    lesson.exchange(outgoing, (rank + step) % size, incoming, src, group)
    return {"incoming": incoming.tolist(), "outgoing": outgoing.tolist()}


def exchange_much(lesson: Any) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = torch.full((NUM_ELEMENTS,), float(rank)), torch.empty(NUM_ELEMENTS)
    lesson.exchange(outgoing, (rank + 1) % size, incoming, (rank - 1) % size)
    return float(incoming.mean())


def exchange_then_write(lesson: Any) -> float:
    """Overwrite what was sent as soon as exchange returns, while the receiver comes late."""
    rank, size = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = torch.full((4,), float(rank)), torch.full((4,), -1.0)
    if rank == size - 1:
        time.sleep(0.01)
    lesson.exchange(outgoing, (rank + 1) % size, incoming, (rank - 1) % size)
    outgoing.fill_(-99.0)
    dist.barrier()
    return float(incoming.mean())


# 1.5 to 1.7


def broadcast_from(lesson: Any, src: int, group: Any = None) -> float:
    x = torch.full((NUM_ELEMENTS,), float(dist.get_rank(group)))
    lesson.broadcast(x, src, group)
    return float(x.mean())


def broadcast_all_kinds(lesson: Any, group: Any = None) -> list[Any]:
    """From every rank in turn, every kind of tensor."""
    arrived = []
    for src in range(dist.get_world_size(group)):
        tensors = tensors_of(dist.get_rank(group))
        for tensor in tensors:
            lesson.broadcast(tensor, src, group)
        arrived.append(plain(tensors))
    return arrived


def reduce_my_rank(lesson: Any, name: str, group: Any = None) -> list[float]:
    """Sum a tensor of the rank's number; return least and greatest element."""
    x = torch.full((NUM_ELEMENTS,), float(2 ** dist.get_rank(group)))
    getattr(lesson, name)(x, group)
    return [float(x.min()), float(x.max())]


def reduce_all_kinds(lesson: Any, name: str, group: Any = None) -> list[Any]:
    tensors = tensors_of(dist.get_rank(group))
    for tensor in tensors:
        getattr(lesson, name)(tensor, group)
    return plain(tensors)


def reduce_fractions(lesson: Any, name: str) -> list[float]:
    """Sum numbers whose sum depends on the order of adding."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(NUM_ELEMENTS, generator=generator)
    getattr(lesson, name)(x)
    return x.tolist()


# 1.8


def measure(lesson: Any, sizes: tuple[int, ...], group: Any = None) -> dict[str, Any]:
    strategies = {
        "naive": lesson.all_reduce_naive,
        "recursive_doubling": lesson.all_reduce_recursive_doubling,
    }
    times = lesson.measure_all_reduce(strategies, sizes, repeats=3, group=group)
    return as_dict(times)


def as_dict(times: Any) -> dict[str, Any]:
    returned("measure_all_reduce", times)
    return {
        "sizes": [int(size) for size in times.sizes_bytes],
        "seconds": {str(k): [float(t) for t in v] for k, v in times.seconds.items()},
        "alpha_s": float(times.alpha_s),
        "bandwidth": float(times.bandwidth_bytes_per_s),
    }


def measure_sleepers(lesson: Any) -> dict[str, Any]:
    """Time strategies that take as long as their name says, in virtual seconds."""
    calls, turns = [0], [0]

    def last_rank_2s(x: Tensor, group: Any) -> None:
        time.sleep(2.0 if dist.get_rank(group) == dist.get_world_size(group) - 1 else 0.0)

    def median_3s(x: Tensor, group: Any) -> None:
        calls[0] += 1  # the first run of a cell is not timed
        time.sleep((50.0, 3.0, 30.0, 30.0, 1.0, 1.0)[(calls[0] - 1) % 6])

    def turns_2s(x: Tensor, group: Any) -> None:
        turns[0] += 1
        time.sleep(2.0 if turns[0] % dist.get_world_size(group) == dist.get_rank(group) else 0.0)

    def chain_2s(x: Tensor, group: Any) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank:
            dist.recv(x, group=group, group_src=rank - 1)
        if rank < size - 1:
            time.sleep(1.0)
            dist.send(x, group=group, group_dst=rank + 1)

    run = (last_rank_2s, median_3s, turns_2s, chain_2s)
    strategies = {strategy.__name__: strategy for strategy in run}
    return as_dict(lesson.measure_all_reduce(strategies, (4, 4000), repeats=5))


def measure_nonsense(lesson: Any) -> list[str]:
    """Return which of the calls that must be refused were refused, on this rank."""
    given = {"naive": lesson.all_reduce_naive}
    calls: dict[str, tuple[Any, Any, int]] = {
        "one size": (given, (4,), 1),
        "the same size twice": (given, (8, 8), 1),
        "6 bytes": (given, (4, 6), 1),
        "no repeat": (given, (4, 8), 0),
        "a strategy called exchange": ({"exchange": lesson.all_reduce_naive}, (4, 8), 1),
    }
    return [name for name, call in calls.items() if _accepts(lesson, *call)]


def _accepts(lesson: Any, strategies: Any, sizes: Any, repeats: int) -> bool:
    try:
        lesson.measure_all_reduce(strategies, sizes, repeats=repeats)
    except ValueError:
        return False
    return True


def fit(lesson: Any, points: list[tuple[list[int], list[float]]]) -> list[list[float]]:
    """α and β of every point list."""
    found = (lesson.fit_alpha_beta(*point) for point in points)
    return [numbers("fit_alpha_beta", line, ("α", "β")) for line in found]
