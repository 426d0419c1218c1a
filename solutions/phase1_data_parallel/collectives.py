"""Collectives built from messages: exchange, broadcast and two all-reduces, and what they cost.

They use only sends and receives. All rank numbers are ranks inside ``group``, not global ranks.
"""

import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phase1_data_parallel.given import AllReduce, AllReduceTimes, Group, finish


def exchange(outgoing: Tensor, dst: int, incoming: Tensor, src: int, group: Group = None) -> None:
    """Send ``outgoing`` to ``dst`` while receiving ``incoming`` from ``src``.

    The send and the receive do not wait for each other, so ranks cannot deadlock, whatever the
    order of their calls. This holds even with NCCL, where torch runs operations between two ranks
    one at a time (even ``isend`` and ``irecv``) unless they are started together.

    Args:
        outgoing: contiguous tensor; not changed. The caller may overwrite it as soon as the call
            returns (with NCCL: by operations on the current stream).
        dst: the rank that receives ``outgoing``; not this rank.
        incoming: contiguous tensor with the shape and dtype of the tensor that ``src`` sends; they
            may differ from those of ``outgoing``. On return it holds what arrived. It must not
            overlap ``outgoing``.
        src: the rank that sends ``incoming``; may differ from ``dst`` (as in a ring) or equal it
            (as in a pair).
        group: the ranks that take part; all by default.

    Cost: one message each way, both at the same time: α + max(bytes out, bytes in)·β seconds; no
        collectives, no barriers.
    """
    both = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=dst),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=src),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def broadcast(x: Tensor, src: int = 0, group: Group = None) -> None:
    """Copy ``x`` from rank ``src`` to all ranks, in place, along a binomial tree.

    In every round, ranks that have the data pass it on to ranks that lack it. One such tree, for
    N = 6 and src = 0:
        round 0    0→1
        round 1    0→2  1→3
        round 2    0→4  1→5
    Any tree of the same cost will do, and a rank may start all its sends together.

    Args:
        x: contiguous tensor with the same shape and dtype on all ranks; overwritten except on
            ``src``. The caller may overwrite it as soon as the call returns (with NCCL: by
            operations on the current stream).
        src: the rank that has the data.
        group: the ranks that take part; all by default.

    Cost: ⌈log2 N⌉ rounds of α + nβ seconds for n bytes; N-1 messages of n bytes in all, at most
        ⌈log2 N⌉ from any one rank; no collectives, and no memory beyond ``x``.
    Source: Thakur, Rabenseifner and Gropp 2005, section 4.2 (binomial tree).
    """
    world_size = dist.get_world_size(group)
    position = (dist.get_rank(group) - src) % world_size  # src is the root, position 0

    have = 1  # positions 0 … have-1 hold the data
    while have < world_size:
        if position < have and position + have < world_size:
            dist.send(x, group=group, group_dst=(position + have + src) % world_size)
        elif have <= position < 2 * have:
            dist.recv(x, group=group, group_src=(position - have + src) % world_size)
        have *= 2


def all_reduce_naive(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over all ranks, in place: rank 0 adds up everything, then broadcasts the sum.

    Args:
        x: contiguous tensor with the same shape and dtype on all ranks; on return it holds the sum,
            bit for bit the same on all ranks. The caller may overwrite it when the call returns
            (with NCCL: by operations on the current stream).
        group: the ranks that take part; all by default.

    Cost: every other rank sends its n bytes to rank 0, one message after another: (N-1)(α + nβ)
        seconds. The broadcast adds ⌈log2 N⌉ rounds of α + nβ and N-1 messages of n bytes. No
        collectives; one extra tensor of the size of ``x`` on rank 0, none elsewhere.
    """
    if dist.get_rank(group) == 0:
        arrived = torch.empty_like(x)
        for src in range(1, dist.get_world_size(group)):
            dist.recv(arrived, group=group, group_src=src)
            x += arrived
    else:
        dist.send(x, group=group, group_dst=0)
    broadcast(x, src=0, group=group)


def all_reduce_recursive_doubling(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over all ranks, in place: partners at distance 1, 2, 4, … swap sums and add them.

    With N = 4 (each cell shows the partner, and below it the sum that the rank holds afterwards):
                  r0      r1      r2      r3
        round 0   1       0       3       2
                  0+1     0+1     2+3     2+3
        round 1   2       3       0       1
                  0…3     0…3     0…3     0…3
    The distances may come in any order. If N is not a power of two, let core be the largest power
    of two below it. Each rank r ≥ core first sends its ``x`` to rank r - core, and gets the sum
    back from that rank at the end. In between, the ranks below core swap and add as above.

    Args:
        x: contiguous tensor with the same shape and dtype on all ranks; on return it holds the sum,
            bit for bit the same on all ranks. The caller may overwrite it when the call returns
            (with NCCL: by operations on the current stream).
        group: the ranks that take part; all by default.

    Cost: for N = 2^k, each rank sends log2 N messages of n bytes, in log2 N (α + nβ) seconds.
        Otherwise there are two more rounds, one to hand over ``x`` and one to return the sum:
        (⌊log2 N⌋ + 2)(α + nβ) seconds in all. No collectives; at most one extra tensor of the size
        of ``x`` on each rank.
    Source: Thakur, Rabenseifner and Gropp 2005, section 4.5 (recursive doubling).
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    core = 2 ** (world_size.bit_length() - 1)  # the largest power of two ≤ N
    arrived = torch.empty_like(x)

    if rank >= core:  # outside the core: hand ``x`` over, get the sum back
        dist.send(x, group=group, group_dst=rank - core)
        dist.recv(x, group=group, group_src=rank - core)
        return

    stands_in_for = rank + core
    if stands_in_for < world_size:
        dist.recv(arrived, group=group, group_src=stands_in_for)
        x += arrived

    distance = 1
    while distance < core:
        partner = rank ^ distance
        exchange(x, partner, arrived, partner, group)
        x += arrived
        distance *= 2

    if stands_in_for < world_size:
        dist.send(x, group=group, group_dst=stands_in_for)


def native_all_reduce(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over all ranks, in place, with the library's own all-reduce."""
    dist.all_reduce(x, group=group)


ALL_REDUCES: dict[str, AllReduce] = {
    "native": native_all_reduce,
    "naive": all_reduce_naive,
    "recursive_doubling": all_reduce_recursive_doubling,
}


def measure_all_reduce(
    strategies: Mapping[str, AllReduce],
    sizes_bytes: Sequence[int],
    *,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> AllReduceTimes:
    """Time every strategy at every size, and fit α and β to the times of a single message.

    Each cell of the returned table gives the time of one strategy, or of an exchange, at one size.
    All ranks start each run of a cell together, and a run takes as long as its slowest rank. The
    time of a cell is the median over its runs; for an even number of runs, any time between the
    middle two will do.

    Args:
        strategies: functions by name; each is called with a tensor and ``group``, and sums the
            tensor in place.
        sizes_bytes: sizes of the float32 tensor, in any order; multiples of 4, at least two of them
            different.
        repeats: number of timed runs for each cell, after one untimed run.
        device: device that the tensors live on; a run lasts until the device has finished.
        group: group of at least two ranks; all ranks by default.

    Returns:
        The table, the same on all ranks: the sizes in the order given, a column for each strategy,
        and a column ``exchange`` with the time of one message to the right neighbour. α and 1/β
        come from applying ``fit_alpha_beta`` to that column.

    Raises:
        ValueError: the same on all ranks, if there are fewer than two ranks, fewer than two
            different sizes or no repeats, if a size is not a multiple of 4, or if a strategy is
            called "exchange".

    Cost: repeats + 1 runs of each cell, plus the time to start them together and to share the
        results.
    """
    world_size = dist.get_world_size(group)
    sizes_fit = len(set(sizes_bytes)) >= 2 and not any(size % 4 for size in sizes_bytes)
    if world_size < 2 or repeats < 1 or not sizes_fit or "exchange" in strategies:
        raise ValueError(
            "needs 2 ranks, 2 sizes that are multiples of 4 bytes, 1 repeat, no strategy called "
            f"exchange: got {world_size} ranks, sizes {list(sizes_bytes)}, {repeats} repeats, "
            f"strategies {list(strategies)}"
        )
    timed = {"exchange": _exchange_in_ring, **strategies}
    seconds = {
        name: tuple(_slowest_rank_s(run, size, repeats, device, group) for size in sizes_bytes)
        for name, run in timed.items()
    }
    alpha_s, beta_s_per_byte = fit_alpha_beta(sizes_bytes, seconds["exchange"])
    return AllReduceTimes(tuple(sizes_bytes), seconds, alpha_s, 1 / beta_s_per_byte)


def fit_alpha_beta(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit seconds = α + bytes·β by least squares on the relative errors.

    With absolute errors, the largest messages would count most, but α shows in the small ones. An
    example without noise:
        [0, 1000, 2000] bytes in [5, 6, 7] µs  ->  α = 5 µs, β = 1 ns/byte

    If noise would make α or β negative, that coefficient is set to 0 and only the other is fitted,
    which gives the best line without negative coefficients.

    Args:
        sizes_bytes: sizes in any order, at least two of them different.
        seconds: one time for each size, above 0.

    Returns:
        α in seconds per message; β in seconds per byte, or ``sys.float_info.min`` instead of 0, so
        that 1/β is finite. Both are floats.
    """
    n, t = np.array(sizes_bytes), np.array(seconds)
    beta, alpha = np.polyfit(n, t, deg=1, w=1 / t)
    if beta <= 0:  # a constant fits best
        return float(np.average(t, weights=1 / t**2)), sys.float_info.min
    if alpha < 0:  # a line through the origin fits best
        return 0.0, float((n / t).sum() / ((n / t) ** 2).sum())
    return float(alpha), float(beta)


def _exchange_in_ring(x: Tensor, group: Group) -> None:
    """Send one message to the right neighbour, and receive one from the left."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    exchange(x, (rank + 1) % world_size, torch.empty_like(x), (rank - 1) % world_size, group)


def _slowest_rank_s(
    run: AllReduce, size_bytes: int, repeats: int, device: torch.device | str, group: Group
) -> float:
    """Return the median over the repeats of the slowest rank's time, in seconds."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    x = torch.zeros(size_bytes // 4, device=device)
    run(x, group)  # opens connections and allocates; not timed

    mine = torch.zeros(repeats, world_size, dtype=torch.float64)  # each rank fills its own column
    for repeat in range(repeats):
        dist.barrier(group)  # start together
        start = time.perf_counter()
        run(x, group)
        finish(x)
        mine[repeat, rank] = time.perf_counter() - start

    everybodys = mine.to(device)
    all_reduce_naive(everybodys, group)  # each column is set on one rank only: the sum joins them
    return float(everybodys.max(dim=1).values.median())
