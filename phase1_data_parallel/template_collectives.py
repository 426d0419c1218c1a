"""Collectives built from messages: exchange, broadcast and two all-reduces, and what they cost.

They only send and receive messages. Rank numbers are those inside ``group``, not global ones.

Tasks 1.3, 1.4 and 1.6 to 1.8. Each docstring says what the function promises, its TODO gives an
example, and guidelines.md explains why and how. To grade one task: ``distlab check 1.3``.
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
    # TODO 1.3: on return ``incoming`` holds what src sent, and ``outgoing`` may be overwritten.
    #   Example: ranks 0, 1 and 2 send their own numbers to the right: they receive 2, 0 and 1.
    #   About 6 lines.
    raise NotImplementedError("Task 1.3: exchange, see guidelines.md#13-exchange-without-deadlock")


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
    # TODO 1.4: all ranks hold what src had, after ⌈log2 N⌉ rounds. Any src and any N must work.
    #   Example: N = 6, whatever src is: 5 messages in 3 rounds, at most 3 of them from src.
    #   About 10 lines.
    raise NotImplementedError("Task 1.4: broadcast, see guidelines.md#14-broadcast-along-a-tree")


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
    # TODO 1.6: all ranks hold the sum, which rank 0 has computed.
    #   Example: three ranks hold 1, 2 and 4: all hold 7 at the end, after four messages.
    #   About 9 lines.
    raise NotImplementedError(
        "Task 1.6: all_reduce_naive, see guidelines.md#16-all-reduce-the-naive-way"
    )


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
    # TODO 1.7: all ranks hold the sum, after log2 N rounds if N is a power of two, otherwise after
    #   two more rounds than for the largest power of two below N.
    #   Example: N = 6: 12 messages in 4 rounds; ranks 0 and 1 send 3 each, ranks 4 and 5 one each.
    #   About 20 lines.
    raise NotImplementedError(
        "Task 1.7: all_reduce_recursive_doubling, see guidelines.md#17-all-reduce-by-doubling"
    )


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
    # TODO 1.8: return the table of seconds, and α and 1/β of its column "exchange".
    #   Example: α = 7 µs, 1/β = 13 GB/s, 4 ranks, 40,000 bytes: exchange takes 10.1 µs,
    #   all_reduce_naive 50.4 µs, the time of 3 + 2 messages.
    #   About 35 lines, with a helper of your own.
    raise NotImplementedError(
        "Task 1.8: measure_all_reduce, see guidelines.md#18-measure-latency-and-bandwidth"
    )


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
    # TODO 1.8: return α and β of the line through the measured points.
    #   Example: as above; and [1000, 2000] bytes in [1, 3] µs: α = 0, β = 15/13 ns per byte.
    #   About 7 lines.
    raise NotImplementedError(
        "Task 1.8: fit_alpha_beta, see guidelines.md#18-measure-latency-and-bandwidth"
    )


def _exchange_in_ring(x: Tensor, group: Group) -> None:
    """Send one message to the right neighbour, and receive one from the left."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    exchange(x, (rank + 1) % world_size, torch.empty_like(x), (rank - 1) % world_size, group)
